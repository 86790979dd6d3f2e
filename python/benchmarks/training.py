"""Steady-state images/s of two one-thread ranks: Paceline over each transport, and bare scripts.

    python training.py --data DATASET --out results/raw/transports.json [--repeats 5] [--steps 16]
        [--only WAY ...] [--horovod-python PYTHON]

DATASET: of `paceline data ingest` (photos of any size). AlexNet 224x224, 32 images a rank, fp32.
All ways are interleaved. PYTHON: one that has Horovod on the same MPI beside torch (default: this
one, where Horovod is installed); without it that way is left out.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from common import call, documented_parser, write_results
from paceline.measure.records.files import write_text
from paceline.measure.records.layout import TrialFiles
from paceline.runner.launchers.base import launcher_for
from training_ways import (
    LIMIT_S,
    StepEnds,
    Ways,
    bare,
    conclude,
    interleaved,
    paceline,
    spec_of,
    step_ends,
    trials_of,
)

if TYPE_CHECKING:
    from paceline.plan.trials.trial import Trial

# None: the default transport of the launcher
WAYS = (
    ("torchrun", "gloo"),
    ("mpi", "mpi"),
    ("mpi", None),
    ("spark", "mpi"),
    ("spark", None),
    ("spark", "gloo"),
    ("spark", "spark-rounds"),
)
HOROVOD = "bare horovod/mpi"

# What Paceline sets with mallopt(3): large tensors are reused, not mapped anew in every step.
ALLOCATOR = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**62)}

CLAIMS = (
    ("mpi against Horovod on MPI", "paceline mpi/mpi", HOROVOD),
    ("mpi against bare torchrun with Gloo", "paceline mpi/mpi", "bare torchrun/gloo"),
    ("mpi against no communication", "paceline mpi/mpi", "paceline nothing"),
    ("mpi against ranks that only meet", "paceline mpi/mpi", "paceline only meeting"),
    ("ranks that only meet against nothing", "paceline only meeting", "paceline nothing"),
    ("spark/mpi against mpi/mpi", "paceline spark/mpi", "paceline mpi/mpi"),
    ("spark/gloo against mpi/mpi", "paceline spark/gloo", "paceline mpi/mpi"),
    ("spark-rounds against mpi/mpi", "paceline spark/spark-rounds", "paceline mpi/mpi"),
    ("mpi with defaults against tuned bare", "paceline mpi/shared", "bare tuned gloo"),
    ("spark with defaults against tuned bare", "paceline spark/shared", "bare tuned gloo"),
    ("back end paceline against gloo, bare", "bare torchrun/paceline", "bare torchrun/gloo"),
    ("own loop against bare, gloo", "paceline torchrun/gloo", "bare torchrun/gloo"),
    ("the same, bare with our allocator", "paceline torchrun/gloo", "bare+allocator gloo"),
    ("own loop against bare, mpi", "paceline mpi/mpi", "bare mpirun/mpi4py"),
    ("spark/gloo against torchrun/gloo", "paceline spark/gloo", "paceline torchrun/gloo"),
)


def without_communication(trial: Trial, folder: Path, *, meet: bool = False) -> StepEnds:
    files = TrialFiles(folder / trial.id)
    write_text(files.trial, trial.model_dump_json(indent=1) + "\n")
    command = launcher_for("mpi").command(trial, files)
    place = command.argv.index(sys.executable) + 1
    own = str(Path(__file__).with_name("without_communication.py"))
    argv = [*command.argv[:place], own, *(["--meet"] if meet else []), *command.argv[place:]]
    call(argv, {**os.environ, **command.environment}, LIMIT_S, folder / "log.txt")
    return step_ends(files)


def ways(dataset: Path, steps: int, horovod_python: str | None) -> Ways:
    found: Ways = {
        "bare torchrun/gloo": lambda folder: bare("gloo", steps, folder),
        "bare+allocator gloo": lambda folder: bare("gloo", steps, folder, ALLOCATOR),
        "bare tuned gloo": lambda folder: bare("gloo", steps, folder, options=["--tuned"]),
        "bare torchrun/paceline": lambda folder: bare("paceline", steps, folder),
        "bare mpirun/mpi4py": lambda folder: bare("mpi4py", steps, folder),
    }
    if horovod_python is not None:
        python = horovod_python
        found[HOROVOD] = lambda folder: bare("horovod", steps, folder, python=python)
    for trial in trials_of(spec_of(steps, WAYS), dataset):
        found[f"paceline {trial.launcher}/{trial.transport}"] = partial(paceline, trial)
        if (trial.launcher, trial.transport) == ("mpi", "mpi"):
            found["paceline nothing"] = partial(without_communication, trial)
            found["paceline only meeting"] = partial(without_communication, trial, meet=True)
    return found


def main() -> None:
    options = arguments()
    every = ways(options.data.resolve(), options.steps, options.horovod_python)
    chosen = options.only or list(every)
    unknown = set(chosen) - {*every, HOROVOD}
    if unknown:
        raise SystemExit(f"--only: expected some of {sorted(every)}, found {sorted(unknown)}")
    raw = interleaved({name: every[name] for name in chosen if name in every}, options.repeats)
    write_results(options.out, "training", conclude(raw, CLAIMS))


def arguments() -> argparse.Namespace:
    parser = documented_parser(__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--only", nargs="+", metavar="WAY")
    has_horovod = importlib.util.find_spec("horovod") is not None
    parser.add_argument("--horovod-python", default=sys.executable if has_horovod else None)
    return parser.parse_args()


if __name__ == "__main__":
    main()
