"""The comparison of the local strategies of a finished run, with the raw step times.

paceline run lerat2022-local --out RUN_DIR
python local_strategies.py RUN_DIR --out local_strategies.json
"""

from __future__ import annotations

import argparse
from pathlib import Path

from common import write_results
from paceline.analysis.compare.run import compare_run
from paceline.records.layout import RunFiles


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    comparison = compare_run(RunFiles(options.run_dir))
    # of every step, the warm-up included, by configuration and repeat
    step_s = {
        configuration: [[round(float(s), 6) for s in trial.steps.time_s] for trial in trials]
        for configuration, trials in comparison.trials.items()
    }
    write_results(
        options.out, "local_strategies", {"step_s": step_s, "comparison": comparison.to_json()}
    )


if __name__ == "__main__":
    main()
