"""A rank slowed on purpose: is it named, and is its loss what was put in?

    python straggler.py --data DATASET --out results/straggler.json [--repeats 3] [--steps 40]

Two one-thread ranks under mpirun, one of which spins for 50 ms a step (slowed_rank.py), and the
same without, interleaved; every transport, either rank. DATASET: of `paceline data ingest`.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import call, median_interval, shown, write_results
from paceline.analysis.communication import trial_communication
from paceline.analysis.reading import load_run
from paceline.records.layout import RunFiles

RANKS = 2
WARMUP = 5
ALLOWED = 0.1  # of the loss that was put in
ALLOWED_SUM = 0.02  # of a step
LIMIT_S = 900.0
HERE = Path(__file__).resolve().parent
JOB = HERE.parents[1] / "mpi-jobs" / "train.py"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40, help="after the warm-up")
    parser.add_argument("--slow-ms", type=float, default=50.0)
    parser.add_argument("--transports", nargs="+", default=["mpi", "gloo", "shared"])
    parser.add_argument("--workload", default="simple-big")
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--global-batch", type=int, default=64)
    arguments = parser.parse_args()

    raw = []
    with tempfile.TemporaryDirectory() as folder:
        for repeat, transport, slowed in itertools.product(
            range(arguments.repeats), arguments.transports, (None, 0, 1)
        ):
            place = Path(folder, f"{repeat}-{transport}-{slowed}")
            raw.append({"repeat": repeat, **measure(arguments, transport, slowed, place)})
            print(raw[-1], file=sys.stderr)
    write_results(arguments.out, "straggler", conclude(raw, arguments.slow_ms / 1000))


def measure(
    arguments: argparse.Namespace, transport: str, slowed: int | None, place: Path
) -> dict[str, Any]:
    """One run; slowed: the rank that spins, None for nobody."""
    seconds = 0.0 if slowed is None else arguments.slow_ms / 1000
    options = {
        "--workload": arguments.workload,
        "--transport": transport,
        "--local-strategy": "processes",
        "--image-size": arguments.image_size,
        "--global-batch": arguments.global_batch,
        "--max-steps": WARMUP + arguments.steps,
        "--warmup-steps": WARMUP,
        "--epochs": 1000,
        "--data": arguments.data.resolve(),
        "--out": place,
    }
    argv = [
        Path(sys.executable).with_name("mpirun"), "-n", RANKS, "--bind-to", "none",
        "--host", f"localhost:{RANKS}", sys.executable,
        HERE / "slowed_rank.py", slowed or 0, seconds, JOB, "--no-sidecar",
        *itertools.chain(*options.items()),
    ]  # fmt: skip
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    call(list(map(str, argv)), {**os.environ, **as_root}, LIMIT_S, place.with_suffix(".log"))
    (record,) = load_run(RunFiles(place))
    profile = trial_communication(record)
    assert profile is not None, "two ranks communicate"
    (found,) = profile.straggling
    return {
        "transport": transport,
        "slowed": slowed,
        "named": found.straggler,
        "reason": found.reason,
        "loss_s": {each.rank: each.loss_s.to_json() for each in found.ranks},
        "last_share": {each.rank: each.last_share for each in found.ranks},
        "phase": found.phase,
        "step_s": max(rank.step_s for rank in profile.ranks),
        "checks": [check.to_json() for check in profile.checks],
    }


def conclude(raw: list[dict[str, Any]], slow_s: float) -> dict[str, Any]:
    """Who was named, and the loss that was found over the one that was put in, by transport."""
    conclusions = {}
    for transport in dict.fromkeys(run["transport"] for run in raw):
        runs = [run for run in raw if run["transport"] == transport]
        slowed = [run for run in runs if run["slowed"] is not None]
        ratio = median_interval([run["loss_s"][run["slowed"]]["mean"] / slow_s for run in slowed])
        shown(f"{transport}: loss found over {1000 * slow_s:g} ms", ratio)
        plain = {run["repeat"]: run["step_s"] for run in runs if run["slowed"] is None}
        longer = median_interval([(r["step_s"] - plain[r["repeat"]]) / slow_s for r in slowed])
        shown(f"{transport}: step longer over {1000 * slow_s:g} ms", longer)
        sums = [abs(check["difference"]) for run in runs for check in run["checks"]]
        conclusions[transport] = {
            "named_right": sum(run["named"] == run["slowed"] for run in slowed),
            "of": len(slowed),
            "named_where_nobody_was_slowed": sum(
                run["named"] is not None for run in runs if run["slowed"] is None
            ),
            "loss_ratio": ratio,
            "step_longer_ratio": longer,  # what the busy loop really cost, the other runs aside
            "within_a_tenth": abs(ratio["median"] - 1) <= ALLOWED,
            "largest_difference_of_sums": max(sums),
            "sums_within_2_percent": max(sums) <= ALLOWED_SUM,
        }
    return {"slow_s": slow_s, "raw": raw, "conclusions": conclusions}


if __name__ == "__main__":
    main()
