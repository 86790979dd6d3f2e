"""`paceline run` for a spec with [tune]: first the search, then the trials with its winners."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from paceline.base.errors import UsageError
from paceline.base.host.machine import usable_cores
from paceline.base.host.own_runs import remember_run
from paceline.measure.records.layout import RunFiles
from paceline.measure.records.rows import Outcome
from paceline.plan.spec import Experiment, Spec, TrialRequest, load_spec
from paceline.plan.trials.planning import plan_trials
from paceline.plan.trials.trial import Trial
from paceline.runner.trials import experiment
from paceline.runner.trials.directory import check_run_dir, made_run_dir, recorded_spec
from paceline.runner.trials.planning import Progress, make_datasets
from paceline.runner.trials.preview import preflight
from paceline.runner.tune.local import tune_local
from paceline.runner.tune.search import Findings


def tune_and_run(
    spec: Spec,
    run_dir: Path,
    *,
    resume: bool,
    progress: Progress,
    keep_going: bool | None = None,
    changed_script: bool = False,
) -> tuple[Findings | None, list[Outcome]]:
    """Search into `run_dir`/tune, then run the tuned spec into `run_dir`.

    Return the findings (None if the search had ended before) and what `experiment.run` returns.
    After the first trial has started the spec no longer changes, so that all trials of a run belong
    to one spec. Raises the errors of `tune_local` and `experiment.run`.
    """
    files = RunFiles(run_dir)
    searched = files.tune.manifest.exists()
    if resume and not searched:
        raise UsageError(
            f"{run_dir}: there is no run to resume ({files.tune.manifest} does not exist); omit "
            "--resume to start one"
        )
    if not searched:
        check_run_dir(files, spec, resume=False)
    check_run_dir(files.tune, spec, resume=resume)
    findings = None
    if not files.manifest.exists():
        datasets = make_datasets(spec.experiment, progress)
        preflight(_smallest_trials(spec.experiment, datasets))
        with made_run_dir(run_dir):
            if not searched:
                remember_run(run_dir)
            findings = tune_local(spec, files.tune.root, resume=resume, progress=progress)
    has_begun = files.manifest.exists()
    failed = experiment.run(
        recorded_spec(run_dir, trust_run=True)
        if has_begun
        else load_spec(str(files.tune.tuned_spec)),
        run_dir,
        resume=has_begun,
        progress=progress,
        keep_going=keep_going,
        changed_script=changed_script,
    )
    return findings, failed


def _smallest_trials(experiment: Experiment, datasets: Mapping[str, str]) -> list[Trial]:
    """Return the smallest trial of every launcher on its number of nodes, so that missing
    prerequisites are found before the search."""
    wanted = dict.fromkeys((t.launcher, t.nodes) for t in experiment.trials)
    smallest = tuple(
        TrialRequest(launcher=launcher, local_strategy="sequential", nodes=nodes)
        for launcher, nodes in wanted
    )
    first = experiment.model_copy(
        update={"trials": smallest, "workloads": experiment.workloads[:1], "repeats": 1}
    )
    return plan_trials(first, datasets, usable_cores())
