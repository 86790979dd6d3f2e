"""`paceline run` of a spec with [tune]: first the search, then the trials with its winners."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline import runner
from paceline.errors import UsageError
from paceline.host.machine import usable_cores
from paceline.plan.planning import plan_trials
from paceline.records.layout import RunFiles
from paceline.runner import make_datasets, preflight
from paceline.spec import TrialRequest, load_spec
from paceline.tune.local import tune_local

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from paceline.plan.trial import Trial
    from paceline.runner import Progress
    from paceline.spec import Experiment
    from paceline.tune.findings import Findings


def tune_and_run(spec: str, run_dir: Path, *, resume: bool, progress: Progress) -> Findings | None:
    """Search into `run_dir`/tune, then run the tuned spec into `run_dir`.

    Returns what the search found; None if its stage was over before. Once the trials have begun
    their spec stays, so that all of a run is of one spec.
    Raises what `tune_local` and `runner.run` raise.
    """
    experiment, text = load_spec(spec)
    files = RunFiles(run_dir)
    searched = files.tune.manifest.exists()
    if resume and not searched:
        raise UsageError(
            f"{run_dir}: expected a run to resume, there is no {files.tune.manifest}; leave out "
            "--resume to start one"
        )
    if not searched:
        runner.check_run_dir(files, experiment, text, resume=False)
    runner.check_run_dir(files.tune, experiment, text, resume=resume)
    findings = None
    if not files.manifest.exists():
        preflight(_smallest_trials(experiment, make_datasets(experiment, progress)))
        findings = tune_local(spec, files.tune.root, resume=resume, progress=progress)
    runner.run(
        str(files.tune.tuned_spec), run_dir, resume=files.manifest.exists(), progress=progress
    )
    return findings


def _smallest_trials(experiment: Experiment, datasets: Mapping[str, Path]) -> list[Trial]:
    """Of every launcher, on its number of nodes, the smallest trial: what it lacks shows before the
    search, not after."""
    wanted = dict.fromkeys((t.launcher, t.nodes) for t in experiment.trials)
    smallest = tuple(
        TrialRequest(launcher=launcher, local_strategy="sequential", nodes=nodes)
        for launcher, nodes in wanted
    )
    first = experiment.model_copy(
        update={"trials": smallest, "workloads": experiment.workloads[:1], "repeats": 1}
    )
    return plan_trials(first, {n: str(path) for n, path in datasets.items()}, usable_cores())
