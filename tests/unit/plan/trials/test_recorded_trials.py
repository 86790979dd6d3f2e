"""Trials that 0.3.0 wrote can be read, and their built-in tasks are found."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from paceline.plan.trials.trial import Trial

RECORDED = Path(__file__).parents[3] / "functional/recorded_runs/0.3.0"


def test_task_of_a_recorded_trial_is_found():
    files = sorted(RECORDED.glob("*/trials/*/trial.json"))
    tasks = {Trial.model_validate_json(file.read_text("utf-8")).training.task for file in files}
    modules = {task.partition(":")[0] for task in tasks if task.startswith("paceline.")}
    assert modules == {"paceline.train.workloads.convolutional"}
    assert all(find_spec(module) for module in modules)
