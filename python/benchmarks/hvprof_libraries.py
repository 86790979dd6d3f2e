"""DeepLab on two hosts: Horovod with its defaults and its grid, DDP likewise, and Paceline.

    python hvprof_libraries.py --out results/raw/hvprof_libraries.json --runs runs/libraries

Needs root: it makes the hosts, with one core each, and links of each of three rates. A round runs
bare_ddp.py with each library and setting, then Paceline's trainings of the experiment hvprof, each
in fresh processes; ratios are those of one round. lab_libraries.py says how Horovod is installed;
its grid has the sizes and waits of hvprof_search.toml, its default values are those of version
0.28.1 (128 MB, 1 ms), and `64 MB, 3.5 ms` are those of the study's version.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common import documented_parser, median_interval, paired_ratio, shown, write_results
from lab_libraries import bare
from paceline.analysis.compare.run import compare_run
from paceline.measure.records.layout import RunFiles
from paceline.runner.lab import Lab, LabSettings

if TYPE_CHECKING:
    from collections.abc import Iterator

BATCH = 4  # of each host
IMAGE_SIZE = 64  # of the workload
STEPS = {"10gbit": 16, "1gbit": 16, "100mbit": 6}  # by the rate of the links
WARMUP_STEPS = 2
DEFAULT = "default"


def main() -> None:
    parser = documented_parser(__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.json")
    parser.add_argument("--runs", type=Path, required=True, metavar="DIR")
    parser.add_argument("--speeds", nargs="+", choices=STEPS, default=list(STEPS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--limit-s", type=float, default=300, help="of one training")
    options = parser.parse_args()
    found = {}
    with Lab(LabSettings(hosts=2, cores=1), name="hvprof") as lab:
        for speed in options.speeds:
            lab.shape(speed)
            rates = measured(lab, speed, options)
            found[speed] = {"images_per_s": rates, **concluded(speed, rates)}
    write_results(options.out, "hvprof_libraries", {"speeds": found})


def settings() -> Iterator[tuple[str, str, list[object], dict[str, str]]]:
    """Yield library, name of the setting, arguments of bare_ddp.py and variables."""
    yield "gloo", DEFAULT, [], {}
    for bucket_mb in (0.5, 100):
        yield "gloo", f"{bucket_mb:g} MB", ["--bucket-mb", bucket_mb], {}
    yield "horovod", DEFAULT, [], {}
    for fusion_mb in (0.5, 64):
        for cycle_ms in (1, 3.5, 10):
            yield (
                "horovod",
                f"{fusion_mb:g} MB, {cycle_ms:g} ms",
                [],
                {
                    "HOROVOD_FUSION_THRESHOLD": f"{round(fusion_mb * 2**20)}",
                    "HOROVOD_CYCLE_TIME": f"{cycle_ms:g}",
                },
            )


def measured(lab: Lab, speed: str, options: argparse.Namespace) -> dict[str, list[float]]:
    """Return images per second of every round, by program."""
    rates: dict[str, list[float]] = {}
    steps = STEPS[speed]
    common = ["--model", "deeplab", "--image-size", IMAGE_SIZE, "--batch", BATCH, "--steps", steps]
    for number in range(options.repeats):
        folder = options.runs.resolve() / f"{speed}-{number}"
        for library, name, words, variables in settings():
            out = folder / f"{library} {name}"
            step_s = bare(lab, library, [*common, *words], out, options.limit_s, **variables)
            rates.setdefault(f"{library} {name}", []).append(2 * BATCH / step_s)
        for name, rate in paceline(lab, folder / "paceline", steps, options.limit_s).items():
            rates.setdefault(f"paceline {name}", []).append(rate)
    return rates


def paceline(lab: Lab, folder: Path, steps: int, limit_s: float) -> dict[str, float]:
    """Run Paceline's trainings once; return images per second by transport and settings."""
    words = [sys.executable, "-m", "paceline.cli", "run", "hvprof", "--out", folder]
    words += ["--repeats", "1"]
    for given in (
        f"training.max_steps={steps}", f"training.warmup_steps={WARMUP_STEPS}",
        "training.learning_rate_warmup_steps=2", f'mpi.hostfile="{lab.hostfile}"',
    ):  # fmt: skip
        words += ["--set", given]
    command = lab.hosts[0].command(*words, "--only", "*.n2r*")
    subprocess.run(command, stdout=sys.stderr, check=True, timeout=3 * limit_s)
    rows = compare_run(RunFiles(folder)).rows
    return {
        " ".join([row.setup.transport, *row.setup.labels]): 2 * BATCH / row.speed.step_median_s
        for row in rows
        if row.placement.nodes == 2 and row.speed.step_median_s is not None
    }


def concluded(speed: str, rates: dict[str, list[float]]) -> dict[str, Any]:
    """Print and return the rates, and of each library the best setting over the default one."""
    rows = {name: median_interval(values) for name, values in rates.items()}
    for name, interval in rows.items():
        shown(f"{speed} {name}", interval, "images/s")
    ratios = {}
    for library in ("gloo", "horovod"):
        own = [name for name in rates if name.startswith(library)]
        best = max(own, key=lambda name: statistics.median(rates[name]))
        ratio = paired_ratio(rates[best], rates[f"{library} {DEFAULT}"])
        ratios[library] = {"best": best, "ratio": ratio}
        shown(f"{speed} {best} over default", ratio)
    return {"rows": rows, "ratios": ratios}


if __name__ == "__main__":
    main()
