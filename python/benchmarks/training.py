"""Steady-state images/s of two one-thread ranks: Paceline against a bare script, interleaved.

    python training.py --data DATASET --out results/training.json [--repeats 5] [--steps 16]

DATASET: of `paceline data ingest` (photos of any size). AlexNet 224x224, 32 images a rank, fp32.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from common import call, median_interval, paired_ratio, shown, write_results
from paceline.launch.registry import launcher_for
from paceline.plan.planning import plan_trials
from paceline.records.files import read_jsonl
from paceline.records.layout import TrialFiles
from paceline.runner import run_trial
from paceline.spec.loading import parse_spec

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from paceline.plan.trial import Trial

BATCH = 32  # of each rank
RANKS = 2
WARMUP_STEPS = 4
LIMIT_S = 600.0
SAFE = str.maketrans("/+ ", "---")  # names of folders

SPEC = """
schema = 1
name = "benchmark"
[training]
max_steps = {steps}
epochs = 1000
global_batch = 64
[[workloads]]
name = "simple-big"
data = "unused"
[telemetry]
interval_s = 1.0
[[trials]]
launcher = "local"
local_strategy = "sequential"
[[trials]]
launcher = "torchrun"
transport = "gloo"
local_strategy = "processes"
ranks_per_node = 2
[[trials]]
launcher = "mpi"
transport = "mpi"
local_strategy = "processes"
ranks_per_node = 2
[[trials]]
launcher = "spark"
transport = "gloo"
local_strategy = "processes"
ranks_per_node = 2
"""

# What Paceline sets with mallopt(3): large tensors are reused, not mapped anew in every step.
ALLOCATOR = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**62)}

CLAIMS = (
    ("mpi/mpi against bare torchrun/gloo", "paceline mpi/mpi", "bare torchrun/gloo", 1.1),
    ("own loop against bare, gloo", "paceline torchrun/gloo", "bare torchrun/gloo", 0.98),
    ("the same, bare with our allocator", "paceline torchrun/gloo", "bare+allocator gloo", 0.98),
    ("own loop against bare, mpi", "paceline mpi/mpi", "bare mpirun/mpi4py", 0.98),
    ("spark/gloo against torchrun/gloo", "paceline spark/gloo", "paceline torchrun/gloo", 0.97),
)


def images_per_s(ends_by_rank: list[list[float]]) -> float:
    """Throughput after warm-up; a global step ends when its slowest rank ends."""
    ends = [max(step) for step in zip(*ends_by_rank, strict=True)]
    steps = len(ends) - WARMUP_STEPS
    elapsed_s: float = ends[-1] - ends[WARMUP_STEPS - 1]
    return steps * BATCH * RANKS / elapsed_s


def bare(
    backend: str, steps: int, folder: Path, settings: Mapping[str, str] | None = None
) -> list[list[float]]:
    script = str(Path(__file__).with_name("bare_ddp.py"))
    own = [script, "--backend", backend, "--batch", str(BATCH), "--steps", str(steps)]
    own += ["--out", str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **(settings or {})}
    if backend == "gloo":
        argv = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        argv += ["--nproc-per-node", str(RANKS), *own]
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    else:
        environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        mpirun = str(Path(sys.executable).with_name("mpirun"))
        argv = [mpirun, "-n", str(RANKS), "--bind-to", "none", sys.executable, *own]
    call(argv, environment, LIMIT_S, folder / "log.txt")
    rows = [json.loads((folder / f"rank{r}.json").read_text()) for r in range(RANKS)]
    return [[float(end) for end in row["step_ended_unix_s"]] for row in rows]


def paceline(trial: Trial, folder: Path) -> list[list[float]]:
    files = TrialFiles(folder / trial.id)
    outcome = run_trial(trial, files)
    if outcome.status != "ok":
        raise RuntimeError(outcome.message)
    return [
        [row["started_unix_s"] + row["step_s"] for row in read_jsonl(rank.steps)]
        for _, rank in files.ranks()
    ]


def candidates(dataset: Path, steps: int) -> dict[str, Callable[[Path], list[list[float]]]]:
    experiment = parse_spec(SPEC.format(steps=steps), "benchmark")
    trials = plan_trials(experiment, {"simple-big": str(dataset)}, RANKS)
    found: dict[str, Callable[[Path], list[list[float]]]] = {
        "bare torchrun/gloo": lambda folder: bare("gloo", steps, folder),
        "bare+allocator gloo": lambda folder: bare("gloo", steps, folder, ALLOCATOR),
        "bare mpirun/mpi4py": lambda folder: bare("mpi4py", steps, folder),
    }
    for trial in trials:
        if trial.repeat == 0 and not trial.is_baseline:
            light = trial.model_copy(update={"save_tensors": False})
            launcher_for(trial.launcher).preflight(light)
            name = f"paceline {trial.launcher}/{trial.transport}"
            found[name] = lambda folder, light=light: paceline(light, folder)  # type: ignore[misc]
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=16)
    arguments = parser.parse_args()

    ways = candidates(arguments.data.resolve(), arguments.steps)
    raw: dict[str, list[list[list[float]]]] = {name: [] for name in ways}
    order = random.Random(1)  # noqa: S311
    with tempfile.TemporaryDirectory(prefix="paceline-benchmark-") as temporary:
        for repeat in range(arguments.repeats):
            names = list(ways)
            order.shuffle(names)
            for name in names:
                folder = Path(temporary) / f"{name.translate(SAFE)}-{repeat}"
                ends = ways[name](folder)
                raw[name].append(ends)
                print(f"{repeat} {name}: {images_per_s(ends):.1f} images/s", file=sys.stderr)

    rates = {name: [images_per_s(ends) for ends in runs] for name, runs in raw.items()}
    claims = [
        {"claim": claim, "target": target, **paired_ratio(rates[ours], rates[theirs])}
        for claim, ours, theirs, target in CLAIMS
    ]
    for name, values in rates.items():
        shown(name, median_interval(values), "images/s")
    for claim in claims:
        shown(f"{claim['claim']} (asked: {claim['target']})", claim, "x")  # type: ignore[arg-type]
    write_results(
        arguments.out,
        "training",
        {"images_per_s": rates, "claims": claims, "step_ended_unix_s": raw},
    )


if __name__ == "__main__":
    main()
