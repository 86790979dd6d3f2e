"""Rendered files, and the paths of data sets and records on the nodes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from paceline.base.errors import UsageError
from paceline.plan.spec.models import TelemetrySettings
from paceline.plan.spec.values import is_remote
from paceline.plan.trials.trial import Trial

SUBMIT = "submit.sh"  # the script that starts all trials in their order
# The scheduler's limit is longer than the trial's own, whose message has a reason.
_MARGIN_S = 300


class CannotRender(Exception):  # noqa: N818  (it reads as the sentence that the user sees)
    """The scheduler cannot start this trial; the message is the reason."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """The files for a scheduler, and the configurations that it cannot start."""

    files: dict[str, str] = field(default_factory=dict)  # content, by name
    left_out: dict[str, str] = field(default_factory=dict)  # reason, by configuration


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Paths on the nodes, on storage that all nodes share."""

    run_dir: str
    data_dir: str | None  # holds a data set per workload, by its name; None: as planned

    def dataset(self, trial: Trial) -> str:
        training = trial.training
        stays = self.data_dir is None or is_remote(training.dataset) or training.items is not None
        return training.dataset if stays else f"{self.data_dir}/{training.entry_name}"


def shipped_trial(trial: Trial, places: Places) -> Trial:
    """Return the trial with the paths of the nodes.

    Relative paths of [telemetry] start here, as for `paceline run`; a job may start anywhere.
    """
    paths = {name: str(path.absolute()) for name, path in telemetry_paths(trial).items()}
    training = trial.training.model_copy(update={"dataset": places.dataset(trial)})
    telemetry = trial.telemetry.model_copy(update=paths)
    return trial.model_copy(update={"training": training, "telemetry": telemetry})


def telemetry_paths(trial: Trial) -> dict[str, Path]:
    """Return the paths that the sidecar reads and writes, by key of [telemetry]."""
    given = ((name, getattr(trial.telemetry, name)) for name in TelemetrySettings.PATHS)
    return {name: Path(path) for name, path in given if path is not None}


def task_files(trial: Trial) -> dict[str, str]:
    """Return the user's file with the trial's task, by name; it belongs beside the trial.

    Raises UsageError if it cannot be read.
    """
    if trial.training.task_sha256 is None:
        return {}
    path = Path(trial.training.task.rpartition(":")[0])
    try:
        return {path.name: path.read_text()}
    except OSError as error:
        raise UsageError(f"task: expected the file {path}, got: {error.strerror}") from error


def trial_text(trial: Trial) -> str:
    return trial.model_dump_json(indent=1) + "\n"


def render(
    trials: Sequence[Trial], files_of: Callable[[list[Trial]], Mapping[str, str]]
) -> Rendered:
    """Render each configuration, in the order of the first planned trial of each.

    files_of: returns the files of one configuration from its repeats; may raise CannotRender.
    """
    repeats_of: dict[str, list[Trial]] = {}
    for trial in sorted(trials, key=lambda t: t.repeat):
        repeats_of.setdefault(trial.configuration, []).append(trial)
    rendered = Rendered()
    for configuration in dict.fromkeys(trial.configuration for trial in trials):
        try:
            rendered.files.update(files_of(repeats_of[configuration]))
        except CannotRender as reason:
            rendered.left_out[configuration] = str(reason)
    return rendered


def with_script(rendered: Rendered, lines: Sequence[str]) -> Rendered:
    """Return the files and the script that starts all of them; nothing if there are none."""
    if not rendered.files:
        return rendered
    return Rendered({**rendered.files, SUBMIT: "\n".join([*lines, ""])}, rendered.left_out)


def limit_s(trial: Trial) -> int:
    """Return the time after which the scheduler may end the trial."""
    return math.ceil(trial.limits.trial_s) + _MARGIN_S
