"""The workload of an entry of [[workloads]]: a built-in one, or a task or a script of the user."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from paceline.base.errors import UsageError
from paceline.plan.spec.descriptors import WorkloadDescriptor
from paceline.plan.spec.extensions import STRATEGIES, TRANSPORTS, WORKLOADS, quoted
from paceline.plan.spec.models import TRIAL_VALUES, Experiment, TrialRequest, WorkloadRequest
from paceline.plan.spec.transport_rules import strategy_of, transport_of
from paceline.plan.spec.values import EVALUATION_KEYS, LEARNING_RATE_KEYS, Target

# Training values that a script decides itself.
_OF_BUILT_IN_TRAININGS = (
    "image_size", "global_batch", "epochs", "learning_rate", "momentum", "dropout", "reading",
    *TRIAL_VALUES, *LEARNING_RATE_KEYS, *EVALUATION_KEYS,
)  # fmt: skip


class ScriptWorkload(WorkloadDescriptor):
    """A script of the user. What only a built-in training has is 0 here."""

    name = "script"
    summary = "a training script of your own"
    model = "script"
    own_samples = True
    needs_facts = False
    samples = 0
    image_size = 0
    global_batch = 0
    learning_rate = 0.0
    momentum = 0.0


def script_faults(workload: WorkloadRequest, experiment: Experiment, place: str) -> Iterator[str]:
    """Yield faults of a [[workloads]] entry that concern a script; `place` names the entry."""
    if workload.script is None:
        for key in ("arguments", "samples_per_step"):
            if getattr(workload, key):
                yield f'{place}.{key}: belongs to a script; add script = "FILE.py", or remove it'
        return
    if workload.name in WORKLOADS:
        yield (
            f'{place}.name: "{workload.name}" is a built-in workload; give the script another name'
        )
    of_tasks = ("data", "samples", "task", "options")
    yield from _decided_by_script(workload, (*_OF_BUILT_IN_TRAININGS, *of_tasks), place)
    if all(each.script is not None for each in experiment.workloads):
        yield from _decided_by_script(experiment.training, _OF_BUILT_IN_TRAININGS, "training")
    if experiment.tune is not None:
        yield "tune: searches are for built-in workloads, got a script; remove [tune]"


# Variables that decide how many threads and which peers a rank has.
_OWN_VARIABLES = (
    "PACELINE_", "OMP_", "MKL_", "OPENBLAS_", "NUMEXPR_", "RANK", "WORLD_SIZE", "LOCAL_RANK",
    "MASTER_", "TORCHELASTIC_",
)  # fmt: skip


def script_trial_faults(trial: TrialRequest) -> Iterator[str]:
    """Yield why a trial without other faults cannot run a script."""
    strategy = strategy_of(trial)
    if strategy is None or not strategy.runs_scripts:
        able = tuple(each.name for each in STRATEGIES.all() if each.runs_scripts)
        yield (
            f"local_strategy: a script has one model per process; use {quoted(able)}, got "
            f'"{trial.local_strategy}"'
        )
        return
    name = transport_of(trial)
    transport = TRANSPORTS.get(name) if name is not None else None
    if transport is None or (transport.joins_ranks and not transport.serves_scripts):
        able = tuple(each.name for each in TRANSPORTS.all() if each.serves_scripts)
        yield f'transport: a script needs a process group; use {quoted(able)}, got "{name}"'
        return
    for variable in trial.environment:
        if variable.startswith(_OWN_VARIABLES):
            yield f"environment.{variable}: Paceline sets it; use threads_per_rank, or remove it"
    own = {*TRIAL_VALUES, *strategy.keys_of_own_training, *transport.keys_of_own_training}
    yield from _decided_by_script(trial, sorted(own & trial.model_fields_set), "")


def _decided_by_script(values: object, keys: Iterable[str], place: str) -> Iterator[str]:
    for key in keys:
        if getattr(values, key) is not None:
            where = f"{place}.{key}" if place else key
            yield f"{where}: a script decides this itself; remove it"


class OwnTask(WorkloadDescriptor):
    """The descriptor of a user's task, made from an entry of [[workloads]]."""

    summary = "a task of the user"
    own_samples = True
    samples = 256
    image_size = 224
    global_batch = 32

    def __init__(self, request: WorkloadRequest) -> None:
        assert request.task is not None
        place, name = split_task_path(request.task)
        self._file = Path(place).resolve() if place.endswith(".py") else None
        self.name = request.name  # type: ignore[misc]  # a descriptor of its own for each request
        self.model = name  # type: ignore[misc]
        self.implementation = f"{self._file or place}:{name}"  # type: ignore[misc]

    @property
    def source_sha256(self) -> str | None:
        """Checksum of the user's file; None for a class of an installed module.

        Raises UsageError if there is no such file.
        """
        if self._file is None:
            return None
        try:
            return hashlib.sha256(self._file.read_bytes()).hexdigest()
        except OSError as error:
            raise UsageError(
                f"task: expected the file {self._file}, got: {error.strerror}; give its path "
                "relative to the current directory"
            ) from None

    @property
    def fields(self) -> tuple[str, str]:  # type: ignore[override]  # derived here
        facts = self.facts()
        return facts.input_field, facts.target_field


def split_task_path(path: str) -> tuple[str, str]:
    """Return (module or file, class). Raises UsageError if the path is not of that form."""
    place, _, name = path.rpartition(":")
    if place and name.isidentifier():
        return place, name
    raise UsageError(f'task: expected "file.py:Class" or "module:Class", got "{path}"')


def workload_of(request: WorkloadRequest) -> WorkloadDescriptor:
    """Return the workload of an entry: the user's task or script, else that of its name.

    Raises UsageError for an unknown name.
    """
    if request.script is not None:
        return ScriptWorkload()
    found = WORKLOADS.get(request.name) if request.task is None else OwnTask(request)
    return found.requested(request)


def reads_dataset(request: WorkloadRequest) -> bool:
    """Return whether there is a data set: a given one, or one with synthesised images."""
    return request.data is not None or not workload_of(request).own_samples


def task_values(request: WorkloadRequest) -> dict[str, Any]:
    """Return the values of a planned training that identify its task."""
    workload = workload_of(request)
    values: dict[str, Any] = {"task": workload.implementation, "model": workload.model}
    if isinstance(workload, OwnTask):
        values["task_sha256"] = workload.source_sha256
    if request.script is None:
        values["options"] = request.options or {}
        values["items"] = None if reads_dataset(request) else workload.facts().items
    return values


def task_target(request: WorkloadRequest) -> Target | None:
    """Return the target that a task states itself."""
    workload = workload_of(request)
    return workload.facts().target if workload.needs_facts else None
