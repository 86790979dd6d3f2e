"""The stages of `paceline run`, in order: spec, data, plan, preflight, trials, comparison, report.

A run can be cut at any moment. What is finished stays; `resume` moves an unfinished or failed
trial aside and runs it afresh.
"""

from __future__ import annotations

import fcntl
import shutil
import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from paceline.analysis.equivalence import check_equivalence
from paceline.data.catalogue import dataset_path, default_cache_dir, ensure_dataset
from paceline.data.dataset import open_dataset
from paceline.errors import ExitCode, PacelineError, RankFailed, TimedOut, UsageError
from paceline.host.machine import host_name, machine_facts, package_versions, usable_cores
from paceline.job.environment import SIDECAR_HOST_VARIABLE
from paceline.job.sidecars import watch
from paceline.launchers.diagnosis import diagnose
from paceline.launchers.registry import launcher_for
from paceline.launchers.supervise import supervise
from paceline.plan.planning import plan_trials
from paceline.plan.schedule import schedule_of
from paceline.records.attempts import set_aside
from paceline.records.compact import compact_trial
from paceline.records.files import read_json, write_json, write_text
from paceline.records.layout import RunFiles, TrialFiles
from paceline.records.rows import SCHEMA, Outcome
from paceline.spec import load_spec
from paceline.spec.extensions import WORKLOADS
from paceline.spec.loading import parse_spec

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from paceline.plan.schedule import Schedule
    from paceline.plan.trial import Trial
    from paceline.spec import Experiment, WorkloadRequest
    from paceline.telemetry import SidecarHandle


class Progress(Protocol):
    """What the runner tells whoever watches; all methods return at once."""

    def stage(self, text: str) -> None: ...
    def data(self, done: int, total: int) -> None: ...
    def trial_started(self, trial: Trial, files: TrialFiles, number: int, of: int) -> None: ...
    def trial_ended(self, trial: Trial, outcome: Outcome) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """An experiment with its data and its trials in order."""

    experiment: Experiment
    spec_text: str
    datasets: dict[str, Path]
    trials: list[Trial]


def plan(spec: str) -> Planned:
    """What `run` would do: makes nothing, needs no data set to exist yet."""
    experiment, text = load_spec(spec)
    datasets = {str(w.name): expected_dataset(experiment, w) for w in experiment.workloads}
    return _planned(experiment, text, datasets)


def run(spec: str, run_dir: Path, *, resume: bool, progress: Progress) -> None:
    """Run every trial of `spec` into `run_dir`.

    Raises UsageError, EnvironmentLacks or DataError before anything runs; RankFailed or TimedOut
    when a trial fails, with all earlier trials intact.
    """
    experiment, text = load_spec(spec)
    files = RunFiles(run_dir)
    check_run_dir(files, experiment, text, resume=resume)
    planned = _planned(experiment, text, make_datasets(experiment, progress))
    preflight(planned.trials)
    run_dir.mkdir(parents=True, exist_ok=True)
    with only_runner(run_dir):
        if not files.manifest.exists():
            write_json(files.manifest, manifest_of(planned))
        _run_trials(planned, files, progress)


def default_run_dir(experiment_name: str) -> Path:
    """`runs/<name>-<local date and time>` under the current directory."""
    return Path("runs") / f"{experiment_name}-{time.strftime('%Y%m%d-%H%M%S')}"


def expected_dataset(experiment: Experiment, workload: WorkloadRequest) -> Path:
    """Where the workload's data set is, or will be once it was made."""
    if workload.data is not None:
        return Path(workload.data).resolve()
    images = workload.samples or WORKLOADS.get(workload.name).samples
    return dataset_path(
        workload.name, images=images, seed=experiment.seed, cache_dir=default_cache_dir()
    )


def make_datasets(experiment: Experiment, progress: Progress) -> dict[str, Path]:
    """The data set of each workload by its name, made where it is to be synthesised."""
    datasets: dict[str, Path] = {}
    for workload in experiment.workloads:
        if workload.data is not None:
            path = Path(workload.data).resolve()
            open_dataset(path)
        else:
            progress.stage(f"data set for {workload.name}")
            path = ensure_dataset(
                workload.name,
                images=workload.samples or WORKLOADS.get(workload.name).samples,
                seed=experiment.seed,
                cache_dir=default_cache_dir(),
                progress=progress.data,
            )
        datasets[workload.name] = path
    return datasets


def _planned(experiment: Experiment, text: str, datasets: dict[str, Path]) -> Planned:
    trials = plan_trials(experiment, {n: str(p) for n, p in datasets.items()}, usable_cores())
    return Planned(experiment=experiment, spec_text=text, datasets=datasets, trials=trials)


def check_run_dir(files: RunFiles, experiment: Experiment, text: str, *, resume: bool) -> None:
    """Raise UsageError unless `files` is a run of this spec to resume, or may become one."""
    if not files.manifest.exists():
        if resume:
            raise UsageError(
                f"{files.root}: expected a run to resume, there is no {files.manifest.name}; "
                "leave out --resume to start one"
            )
        others = [p for p in files.root.glob("*") if p != files.tune.root]
        if others:
            raise UsageError(
                f"{files.root}: expected a new or empty directory; choose another with --out"
            )
        return
    if not resume:
        raise UsageError(
            f"{files.root}: holds a run already; add --resume to complete it, or choose another "
            "directory with --out"
        )
    before = read_json(files.manifest).get("spec_toml")
    if before != text and (
        not isinstance(before, str) or parse_spec(before, str(files.manifest)) != experiment
    ):
        raise UsageError(
            f"{files.root}: holds a run of another spec; a run is completed with the spec it was "
            f"started with (spec_toml in {files.manifest.name}), or start anew with --out"
        )


def preflight(trials: Iterable[Trial]) -> None:
    """Refuse before anything runs, not after an hour of other trials."""
    checked: set[str] = set()
    for trial in trials:
        if trial.configuration not in checked:
            checked.add(trial.configuration)
            launcher_for(trial.launcher).preflight(trial)


@contextmanager
def only_runner(run_dir: Path) -> Iterator[None]:
    """Hold the run directory; a second `paceline run` on it is refused, not queued."""
    with (run_dir / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UsageError(
                f"{run_dir}: another `paceline run` is writing here; wait for it, or choose "
                "another directory with --out"
            ) from error
        yield


def manifest_of(planned: Planned) -> dict[str, Any]:
    """What a run directory says of itself."""
    return {
        "schema": SCHEMA,
        "name": planned.experiment.name,
        "description": planned.experiment.description,
        "created_unix_s": time.time(),
        "spec_toml": planned.spec_text,
        "trials": [trial.id for trial in planned.trials],
        "data": {name: str(path) for name, path in planned.datasets.items()},
        "versions": package_versions(),
        "host": machine_facts(),
    }


def _run_trials(planned: Planned, files: RunFiles, progress: Progress) -> None:
    total = len(planned.trials)
    for number, trial in enumerate(planned.trials, start=1):
        trial_files = files.trial(trial.id)
        if is_finished(trial_files):
            continue
        set_aside(files, trial.id)
        progress.trial_started(trial, trial_files, number, total)
        outcome = run_trial(trial, trial_files)
        progress.trial_ended(trial, outcome)
        if outcome.status != "ok":
            raise failure_of(outcome, files)
        check_equivalences(planned.trials, files, keep_tensors=planned.experiment.keep_tensors)


def is_finished(files: TrialFiles) -> bool:
    """Whether the trial ended well."""
    return files.outcome.exists() and read_json(files.outcome)["status"] == "ok"


def run_trial(trial: Trial, files: TrialFiles) -> Outcome:
    """Launch one trial with its sidecar, wait for its end, and record how it ended."""
    launcher = launcher_for(trial.launcher)
    write_text(files.trial, trial.model_dump_json(indent=1) + "\n")
    command = launcher.command(trial, files)
    environment = {**command.environment, SIDECAR_HOST_VARIABLE: host_name()}
    command = type(command)(argv=command.argv, environment=environment)
    write_text(files.command, command.shell_line() + "\n")
    sidecars: list[SidecarHandle] = []
    try:
        ended = supervise(
            command,
            files,
            limit_s=trial.limits.trial_s,
            on_started=lambda pid: sidecars.extend(watch(trial, files, host_name(), (pid,))),
        )
    finally:
        for sidecar in sidecars:
            sidecar.stop()
    outcome = diagnose(trial, files, ended, launcher)
    write_json(files.outcome, asdict(outcome))
    if outcome.status == "ok":
        compact_trial(files)
    return outcome


def failure_of(outcome: Outcome, files: RunFiles) -> PacelineError:
    """The error that ends a run whose trial ended so."""
    message = (
        f"{outcome.message}\n"
        f"Finished trials are intact in {files.root}; complete the run with --resume."
    )
    if outcome.status == "timed_out":
        return TimedOut(message)
    if outcome.exit_code in set(ExitCode) - {ExitCode.OK, ExitCode.RANK_FAILED}:
        error = PacelineError(message)
        error.exit_code = ExitCode(outcome.exit_code)
        return error
    return RankFailed(message, outcome.failed_rank)


def check_equivalences(trials: Sequence[Trial], files: RunFiles, *, keep_tensors: bool) -> None:
    """Compare those of `trials` that have finished with their baseline as soon as both have.

    Tensors of a trial are big (VGG16: 2 x 537 MB) and are deleted once compared, but for the
    first baseline of each workload and precision.
    """
    finished = [t for t in trials if is_finished(files.trial(t.id))]
    for trial in finished:
        trial_files = files.trial(trial.id)
        if trial_files.equivalence.exists():
            continue
        baseline = _reference(trial, finished, trials)
        if baseline is None:
            continue
        check_equivalence(trial_files, files.trial(baseline.id), _schedule(trial))
        if trial.id != baseline.id and not keep_tensors:
            shutil.rmtree(trial_files.weights.parent, ignore_errors=True)


def _schedule(trial: Trial) -> Schedule:
    """The samples that the trial's steps should have seen."""
    training = trial.training
    dataset = open_dataset(training.dataset)
    return schedule_of(training, dataset.row_group_rows)


def _reference(trial: Trial, finished: list[Trial], planned: Sequence[Trial]) -> Trial | None:
    """The baseline that `trial` is held against: of its precision if one is planned, else fp32."""
    ours = [t for t in planned if t.is_baseline and t.training.workload == trial.training.workload]
    same = [t for t in ours if t.training.precision == trial.training.precision]
    chosen = (same or ours)[0]
    return chosen if chosen in finished else None
