"""Steady-state images/s of two one-thread ranks by what carries their gradients, interleaved.

    python transports.py --data DATASET --out results/raw/transports.json [--repeats 5] [--steps 16]
        [--horovod-python PYTHON]

DATASET: of `paceline data ingest` (photos of any size). AlexNet 224x224, 32 images a rank, fp32.
PYTHON: one that has Horovod on the same MPI beside torch; without it that row is left out.
"""

from __future__ import annotations

import argparse
import os
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from common import call, write_results
from paceline.launchers.base import launcher_for
from paceline.records.files import write_text
from paceline.records.layout import TrialFiles
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
    from paceline.plan.trial import Trial

WAYS = (
    ("mpi", "mpi"),
    ("mpi", "shared"),
    ("torchrun", "gloo"),
    ("spark", "mpi"),
    ("spark", "gloo"),
    ("spark", "spark-rounds"),
)

CLAIMS = (
    ("mpi against Horovod on MPI", "paceline mpi/mpi", "bare horovod/mpi", 1.5),
    ("mpi against bare torchrun with Gloo", "paceline mpi/mpi", "bare torchrun/gloo", 1.25),
    ("mpi against no communication", "paceline mpi/mpi", "paceline nothing", 0.97),
    ("mpi against ranks that only meet", "paceline mpi/mpi", "paceline only meeting", 0.97),
    ("ranks that only meet against nothing", "paceline only meeting", "paceline nothing", 0.0),
    ("spark/mpi against mpi/mpi", "paceline spark/mpi", "paceline mpi/mpi", 0.98),
    ("spark/gloo against mpi/mpi", "paceline spark/gloo", "paceline mpi/mpi", 0.0),
    ("spark-rounds against mpi/mpi", "paceline spark/spark-rounds", "paceline mpi/mpi", 0.0),
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
    trials = trials_of(spec_of(steps, WAYS), dataset)
    found: Ways = {"bare torchrun/gloo": lambda folder: bare("gloo", steps, folder)}
    if horovod_python is not None:
        python = horovod_python
        found["bare horovod/mpi"] = lambda f: bare("horovod", steps, f, python=python)
    for trial in trials:
        found[f"paceline {trial.launcher}/{trial.transport}"] = partial(paceline, trial)
        if (trial.launcher, trial.transport) == ("mpi", "mpi"):
            found["paceline nothing"] = partial(without_communication, trial)
            found["paceline only meeting"] = partial(without_communication, trial, meet=True)
            for bucket_mb in (5.0, 100.0):
                options = trial.transport_options.model_copy(update={"bucket_mb": bucket_mb})
                other = trial.model_copy(update={"transport_options": options})
                found[f"paceline mpi/mpi {bucket_mb:.0f} MB"] = partial(paceline, other)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--horovod-python")
    parser.add_argument("--only", nargs="*", help="these ways alone, by name")
    arguments = parser.parse_args()

    found = ways(arguments.data.resolve(), arguments.steps, arguments.horovod_python)
    chosen = {n: way for n, way in found.items() if not arguments.only or n in arguments.only}
    raw = interleaved(chosen, arguments.repeats)
    write_results(arguments.out, "transports", conclude(raw, CLAIMS))


if __name__ == "__main__":
    main()
