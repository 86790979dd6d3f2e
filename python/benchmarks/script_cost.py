"""Paceline's own cost in each step of a script, against plain torchrun, interleaved.

    python script_cost.py --out results/raw/script_cost.json [--repeats 7] [--steps 60]

bare_ddp.py, AlexNet 224x224 on two one-thread ranks over Gloo, knows nothing of Paceline and notes
itself when each step ended. It runs under torchrun alone, and as `paceline run SCRIPT.py`.
Its own times are compared, so the ratio contains hooks, records, recorded process group and
sidecar. "same resources" gives plain torchrun the cores and the allocator settings that Paceline
gives every rank; without them Paceline gains more than its records cost.

Before that, the CPU time of the records alone: a training of one small layer in this process, with
and without them, interleaved. It hardly depends on other programs on the machine.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from functools import partial
from pathlib import Path

import torch

from common import median_interval, shown, write_results
from paceline.collectives.recorder import Recorder
from paceline.measure.records.files import JsonlWriter
from paceline.measure.records.layout import RankFiles
from paceline.plan.spec.loading import load_spec
from paceline.plan.trials.planning import plan_trials
from paceline.runner.job.context import rank_context
from paceline.runner.launchers.base import launcher_for
from paceline.train.rank.script.recorder import TrainingRecorder
from paceline.train.rank.spans import writing_to
from training_ways import (
    BATCH,
    RANKS,
    StepEnds,
    Ways,
    bare,
    conclude,
    ends_in,
    interleaved,
    trained,
)

STEPS_OF_LAYER = 2000
SCRIPT = Path(__file__).with_name("bare_ddp.py")
# Runs a script with the cores and the allocator settings that Paceline gives each rank.
SAME_RESOURCES = """
import os, runpy, sys
from paceline.train.training.resources import keep_freed_memory
cores = sorted(os.sched_getaffinity(0))
os.sched_setaffinity(0, {cores[int(os.environ["LOCAL_RANK"]) % len(cores)]})
keep_freed_memory()
sys.argv = sys.argv[1:]
sys.path[0] = os.path.dirname(sys.argv[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def script_arguments(steps: int, folder: Path) -> list[str]:
    return ["--backend", "gloo", "--batch", str(BATCH), "--steps", str(steps), "--out", str(folder)]


def with_same_resources(steps: int, folder: Path) -> StepEnds:
    folder.mkdir(parents=True)
    wrapper = folder / "same_resources.py"
    wrapper.write_text(SAME_RESOURCES)
    return bare("gloo", steps, folder, wrapper=[str(wrapper)])


def as_script(steps: int, folder: Path) -> StepEnds:
    spec = {
        "schema": 2,
        "name": "script-cost",
        "repeats": 1,
        "workloads": [{"script": str(SCRIPT), "arguments": script_arguments(steps, folder)}],
        "trials": [
            {"launcher": "local", "local_strategy": "sequential"},
            {
                "launcher": "torchrun",
                "local_strategy": "processes",
                "transport": "gloo",
                "ranks_per_node": RANKS,
                "threads_per_rank": 1,
            },
        ],
    }
    planned = plan_trials(load_spec(spec).experiment, {}, RANKS)
    (trial,) = (each for each in planned if not each.is_baseline)
    launcher_for(trial.launcher).preflight(trial)
    trained(trial, folder / "run" / "trials")
    return ends_in(folder)


def small_training(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> float:
    """Return the CPU time of `STEPS_OF_LAYER` steps of a small layer, in seconds per step."""
    batch = torch.ones(4, 8)
    began_s = time.thread_time()
    for _ in range(STEPS_OF_LAYER):
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()
    return (time.thread_time() - began_s) / STEPS_OF_LAYER


def records_alone(repeats: int) -> dict[str, list[float]]:
    """Return the CPU seconds per step with and without records, by repeat."""
    spec = {
        "schema": 2,
        "name": "script-cost",
        "workloads": [{"script": str(SCRIPT)}],
        "trials": [{"launcher": "local", "local_strategy": "sequential"}],
    }
    training = plan_trials(load_spec(spec).experiment, {}, 1)[0].training
    context = rank_context(0, ["host"], None)
    found: dict[str, list[float]] = {"with": [], "without": []}
    torch.set_num_threads(1)
    for repeat in range(repeats + 1):
        model = torch.nn.Linear(8, 8)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        without = small_training(optimizer, model)
        with tempfile.TemporaryDirectory() as folder:
            files = RankFiles(Path(folder))
            operations = Recorder(writing_to(JsonlWriter(files.communication)))
            recorder = TrainingRecorder(training, context, files, operations, lambda _: None)
            with recorder.recording():
                recorded = small_training(optimizer, model)
        if repeat:  # the first one warms up
            found["without"].append(without)
            found["with"].append(recorded)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--steps", type=int, default=60)
    arguments = parser.parse_args()
    records = records_alone(arguments.repeats)
    added = [1e6 * (a - b) for a, b in zip(records["with"], records["without"], strict=True)]
    shown("CPU time of the records, a step", median_interval(added), "us")
    ways: Ways = {
        "plain torchrun": partial(bare, "gloo", arguments.steps),
        "plain torchrun, same resources": partial(with_same_resources, arguments.steps),
        "paceline run SCRIPT.py": partial(as_script, arguments.steps),
    }
    raw = interleaved(ways, arguments.repeats)
    own = "paceline run SCRIPT.py"
    claims = [
        ("own cost: speed with records over without", own, "plain torchrun, same resources"),
        ("speed over plain torchrun", own, "plain torchrun"),
    ]
    results = {"records_cpu_us": added, "records_cpu_s_per_step": records, **conclude(raw, claims)}
    write_results(arguments.out, "script_cost", results)


if __name__ == "__main__":
    main()
