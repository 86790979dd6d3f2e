"""Steady-state images/s of two one-thread ranks: Paceline against bare scripts, interleaved.

    python training.py --data DATASET --out results/raw/training.json [--repeats 5] [--steps 16]
        [--only WAY ...]

DATASET: of `paceline data ingest` (photos of any size). AlexNet 224x224, 32 images a rank, fp32.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from common import write_results
from training_ways import Ways, bare, conclude, interleaved, paceline, spec_of, trials_of

WAYS = (("torchrun", "gloo"), ("mpi", "mpi"), ("mpi", None), ("spark", None), ("spark", "gloo"))

# What Paceline sets with mallopt(3): large tensors are reused, not mapped anew in every step.
ALLOCATOR = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**62)}

CLAIMS = (
    ("mpi with defaults against tuned bare", "paceline mpi/shared", "bare tuned gloo", 1.25),
    ("spark with defaults against tuned bare", "paceline spark/shared", "bare tuned gloo", 1.25),
    ("back end paceline against gloo, bare", "bare torchrun/paceline", "bare torchrun/gloo", 1.25),
    ("mpi/mpi against bare torchrun/gloo", "paceline mpi/mpi", "bare torchrun/gloo", 1.1),
    ("own loop against bare, gloo", "paceline torchrun/gloo", "bare torchrun/gloo", 0.98),
    ("the same, bare with our allocator", "paceline torchrun/gloo", "bare+allocator gloo", 0.98),
    ("own loop against bare, mpi", "paceline mpi/mpi", "bare mpirun/mpi4py", 0.98),
    ("spark/gloo against torchrun/gloo", "paceline spark/gloo", "paceline torchrun/gloo", 0.97),
)


def ways(dataset: Path, steps: int) -> Ways:
    found: Ways = {
        "bare torchrun/gloo": lambda folder: bare("gloo", steps, folder),
        "bare+allocator gloo": lambda folder: bare("gloo", steps, folder, ALLOCATOR),
        "bare tuned gloo": lambda folder: bare("gloo", steps, folder, options=["--tuned"]),
        "bare torchrun/paceline": lambda folder: bare("paceline", steps, folder),
        "bare mpirun/mpi4py": lambda folder: bare("mpi4py", steps, folder),
    }
    for trial in trials_of(spec_of(steps, WAYS), dataset):
        name = f"paceline {trial.launcher}/{trial.transport}"
        found[name] = partial(paceline, trial)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--only", nargs="+", metavar="WAY")
    arguments = parser.parse_args()

    every = ways(arguments.data.resolve(), arguments.steps)
    raw = interleaved({n: every[n] for n in arguments.only or every}, arguments.repeats)
    write_results(arguments.out, "training", conclude(raw, CLAIMS))


if __name__ == "__main__":
    main()
