"""The run directory: new, resumed, or refused."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from paceline.analysis.between_runs.two_runs import machine_identity
from paceline.analysis.trial.reading import load_manifest
from paceline.base.errors import NotComparable, UsageError
from paceline.base.host.own_runs import THE_SPEC, check_own_run
from paceline.measure.records.documents import only_writer, read_stopping
from paceline.measure.records.files import read_json
from paceline.measure.records.layout import RunFiles
from paceline.measure.records.sources import changed_sources
from paceline.plan.spec.loading import Spec, parse_spec, with_repeats, with_trials
from paceline.plan.spec.models import Experiment
from paceline.plan.trials.trial import Trial
from paceline.runner.trials.planning import host_facts
from paceline.runner.trials.run_trial import is_finished


def check_machine(manifest: Mapping[str, Any], run_dir: Path) -> None:
    """Raise NotComparable if a run with this manifest was measured on another machine."""
    names = [machine_identity(each) for each in (manifest, {"host": host_facts()})]
    if manifest.get("host") and names[0] != names[1]:
        before, now = (", ".join(each) for each in names)
        raise NotComparable(
            f"{run_dir}: expected a run of this machine ({now}), got one of another ({before}); "
            "measure on the machine of the run"
        )


def default_run_dir(experiment_name: str) -> Path:
    """Return `runs/<name>-<local date and time>` under the current directory."""
    return Path("runs") / f"{experiment_name}-{time.strftime('%Y%m%d-%H%M%S')}"


def recorded_spec(run_dir: Path, *, trust_run: bool = False) -> Spec:
    """Return the spec of a run, with the changes that it was started with.

    Before the first trial of a spec with [tune], that is the spec of the search. Its checks import
    the tasks that it names. Raises UsageError if the directory contains none, or unless this user
    made the run or trusts it.
    """
    files = RunFiles(run_dir)
    manifest = files.manifest if files.manifest.exists() else files.tune.manifest
    text = read_json(manifest).get("spec_toml") if manifest.exists() else None
    if not isinstance(text, str):
        raise UsageError(
            f"{run_dir}: expected a run to resume, found no spec in {files.manifest.name}; start "
            "the run again without --resume"
        )
    if not trust_run:
        check_own_run(run_dir, THE_SPEC)
    return Spec(parse_spec(text, str(manifest)), text)


def extended_spec(
    run_dir: Path,
    *,
    repeats: int | None = None,
    added: Sequence[str] = (),
    trust_run: bool = False,
) -> Spec:
    """Return the spec of a run with a higher number of repeats, and with further trials.

    The number may be that of the run, if it has failed or missing trials: then these run.
    added: keys and values of a [[trials]] entry each, as `with_trials` takes them.
    Raises UsageError if the directory contains no run that has begun, or nothing would run;
    NotComparable if the run was measured on another machine. trust_run: as for `recorded_spec`.
    """
    files = RunFiles(run_dir)
    recorded = recorded_spec(run_dir, trust_run=trust_run)
    if not files.manifest.exists():
        raise UsageError(
            f"{run_dir}: expected a run that has begun, found only its search; complete it first "
            f"with `paceline run --resume {run_dir}`"
        )
    spec = with_trials(recorded, added) if added else recorded
    spec = spec if repeats is None else with_repeats(spec, repeats)
    _check_resumed(files, spec)
    is_longer = added or recorded.experiment.repeats != repeats
    if repeats is not None and not is_longer and _is_complete(files):
        raise _no_further_repeats(files, repeats, repeats)
    return spec


def _is_complete(files: RunFiles) -> bool:
    return all(is_finished(files.trial(name)) for name in load_manifest(files).get("trials", []))


def _no_further_repeats(files: RunFiles, has: int, asked: int) -> UsageError:
    return UsageError(
        f"{files.root}: expected more repeats than the {has} of this run, got {asked}; give a "
        f"higher number, or leave out --repeats: `paceline run --resume {files.root}` runs the "
        "failed and missing trials"
    )


def check_added(files: RunFiles, trials: Iterable[Trial], left_out: Iterable[str]) -> None:
    """Raise UsageError if a run shall get further [[trials]], but its plan has none of them.

    trials: of the plan. left_out: why it lacks configurations.
    """
    known = set(load_manifest(files).get("trials", []))
    if all(trial.id in known for trial in trials):
        reasons = "".join(f"\n  - {each}" for each in left_out)
        raise UsageError(
            f"{files.root}: expected a configuration that this run does not have yet; `only` of "
            f"its spec or this machine excludes it, so start a new run without --resume{reasons}"
        )


def check_run_dir(files: RunFiles, spec: Spec, *, resume: bool) -> None:
    """Raise UsageError unless `files` is a run of this spec to resume, or may become one.

    A run to resume may have fewer repeats and trials; raise NotComparable if it is one of another
    machine.
    """
    with _unusable(files.root):
        has_run = files.manifest.exists()
    if not resume:
        check_new(files)
    elif has_run:
        _check_resumed(files, spec)
    else:
        raise UsageError(
            f"{files.root}: expected a run to resume, found no {files.manifest.name}; "
            "leave out --resume to start one"
        )


def check_new(files: RunFiles) -> None:
    """Raise UsageError unless a run may begin here."""
    with _unusable(files.root):
        has_run = files.manifest.exists()
        others = [path for path in files.root.glob("*") if not _may_be_first(path, files)]
    if has_run:
        raise UsageError(
            f"{files.root}: holds a run already; complete it with `paceline run --resume "
            f"{files.root}`, or choose another directory with --out"
        )
    if others:
        raise UsageError(
            f"{files.root}: expected a new or empty directory; choose another with --out"
        )


def check_code(files: RunFiles) -> None:
    """Raise NotComparable if the code of the finished trials of a run is different now."""
    own = [trial for _, trial in files.trials() if is_finished(trial)]
    changed = sorted({name for trial in own for name in changed_sources(trial)})
    if changed:
        raise NotComparable(
            f"{files.root}: expected the code with which its finished trials ran, found changes in "
            f"{', '.join(changed)}; undo them, start a new run without --resume, or continue with "
            "--changed-script: then `paceline compare` says which trials ran the older version"
        )


def has_ended(files: RunFiles) -> bool:
    """Tell whether nothing is left to run of a run that is resumed with its own spec."""
    if not all(is_finished(trial) for _, trial in files.trials()):
        return False
    stopping = read_stopping(files)
    if stopping is None:
        return _is_complete(files)
    return stopping.stopped in ("decided", "max_repeats")


def _may_be_first(path: Path, files: RunFiles) -> bool:
    """Return whether a path in a run directory may be there before the run.

    A search and the place of a copy may be, and what a run leaves that was killed before it had
    written its manifest.
    """
    left = (files.lock.name, f".{files.manifest.name}.")
    return path in (files.tune.root, files.copy) or path.name.startswith(left)


def _check_resumed(files: RunFiles, spec: Spec) -> None:
    manifest = load_manifest(files)
    text = manifest.get("spec_toml")
    if text == spec.text:
        return
    before = parse_spec(text, str(files.manifest)) if isinstance(text, str) else None
    if before == spec.experiment:
        return
    repeats = spec.experiment.repeats
    if before is None or not _extends(spec.experiment, before):
        raise UsageError(
            f"{files.root}: holds a run of another spec; resume it with its own spec (spec_toml in "
            f"{files.manifest.name}), as `paceline run --resume {files.root}` does, or start a new "
            "run with --out"
        )
    has = _repeats_of(files, before)
    least = has if len(spec.experiment.trials) > len(before.trials) else has + 1
    is_other = repeats != before.repeats
    if is_other and repeats != "auto" and repeats < least:
        raise _no_further_repeats(files, has, repeats)
    check_machine(manifest, files.root)


def _extends(later: Experiment, before: Experiment) -> bool:
    """Return whether a spec is an earlier one with more trials, or with a fixed number of repeats,
    and no other change."""
    may_differ: dict[str, Any] = {"trials": True}
    if later.repeats != "auto":
        of_repeats = {"repeats": True, "max_repeats": True, "tie_margin": True}
        may_differ |= {**of_repeats, "limits": {"run_s"}}
    ours, theirs = (each.model_dump(exclude=may_differ) for each in (later, before))
    return ours == theirs and later.trials[: len(before.trials)] == before.trials


def _repeats_of(files: RunFiles, experiment: Experiment) -> int:
    """Return how many repeats a run has: those of its spec, or those after which it last looked."""
    if experiment.repeats != "auto":
        return experiment.repeats
    stopping = read_stopping(files)
    return stopping.looks[-1].repeats if stopping is not None and stopping.looks else 1


@contextmanager
def made_run_dir(run_dir: Path) -> Iterator[None]:
    """Make the directory, so that a wrong path fails at once; remove it again after an error."""
    existed = run_dir.exists()
    with _unusable(run_dir):
        run_dir.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        if not existed:
            with suppress(OSError):  # it is not empty
                run_dir.rmdir()
        raise


@contextmanager
def only_runner(run_dir: Path) -> Iterator[None]:
    """Lock the run directory; refuse a second `paceline run` on it instead of waiting.

    At a good end, the states from which trials replay steps are removed: no trial needs them.
    """
    with ExitStack() as stack:
        with _unusable(run_dir):
            is_ours = stack.enter_context(only_writer(RunFiles(run_dir)))
        if not is_ours:
            raise UsageError(
                f"{run_dir}: another `paceline run` is writing here; wait for it, or choose "
                "another directory with --out"
            )
        yield
        shutil.rmtree(RunFiles(run_dir).replay, ignore_errors=True)


@contextmanager
def _unusable(run_dir: Path) -> Iterator[None]:
    """Raise UsageError if the file system does not allow to use `run_dir`."""
    try:
        yield
    except OSError as error:
        raise UsageError(
            f"{run_dir}: expected a directory that can be written, got: {error.strerror or error}; "
            "choose another with --out"
        ) from error
