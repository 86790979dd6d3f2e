"""The workload of an entry of [[workloads]]: a built-in one, or a task or a script of the user."""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any, cast

from paceline.base.errors import UsageError
from paceline.base.host.files import regular_bytes
from paceline.plan.spec.descriptors import WorkloadDescriptor
from paceline.plan.spec.extensions import WORKLOADS
from paceline.plan.spec.models import Experiment, WorkloadRequest
from paceline.plan.spec.values import DEFAULT_EPOCHS, Target, training_steps


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


def module_file(name: str, folder: Path) -> Path | None:
    """Return the file that `python -m NAME` would run in a folder; None if there is none.

    Nothing is imported: a package may do anything at its import.
    """
    search = [str(folder), *sys.path[1:]]
    found, whole = None, ""
    for word in name.split("."):
        whole = f"{whole}.{word}" if whole else word
        found = _found_module(whole, search)
        search = [] if found is None else list(found.submodule_search_locations or ())
    if search:  # a package
        found = _found_module(f"{name}.__main__", search)
    if found is None or not found.has_location or found.origin is None:
        return None
    return Path(found.origin)


def _found_module(name: str, search: Sequence[str]) -> ModuleSpec | None:
    specs = (finder.find_spec(name, search) for finder in sys.meta_path)
    return next((spec for spec in specs if spec is not None), None)


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
            return hashlib.sha256(regular_bytes(self._file)).hexdigest()
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


def first_given(name: str, workload: WorkloadRequest, experiment: Experiment) -> Any:
    """Return a training value of the workload, else of [training], else None."""
    own = getattr(workload, name)
    return getattr(experiment.training, name) if own is None else own


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchAxis:
    """Several global batches of one entry of [[workloads]], each a training of its own.

    batches: the global batches; empty with per_replica. per_replica: batch of each replica, so that
    the global batch grows with the replicas of a trial (weak scaling).
    """

    batches: tuple[int, ...] = ()
    per_replica: int | None = None

    @property
    def words(self) -> str:
        """The key and its value, as in a spec."""
        if self.per_replica is not None:
            return f"batch_per_replica = {self.per_replica}"
        return f"global_batch = {list(self.batches)}"


def batch_axis(workload: WorkloadRequest, experiment: Experiment) -> BatchAxis | None:
    """Return the batches of an entry, or else those of [training]; None with one global batch."""
    for table in (workload, experiment.training) if workload.script is None else ():
        if table.batch_per_replica is not None:
            return BatchAxis(per_replica=table.batch_per_replica)
        if isinstance(table.global_batch, tuple):
            return BatchAxis(batches=table.global_batch)
        if table.global_batch is not None:
            return None
    return None


def with_global_batch(workload: WorkloadRequest, batch: int) -> WorkloadRequest:
    """Return the entry with one global batch."""
    return workload.model_copy(update={"global_batch": batch, "batch_per_replica": None})


def name_with_batch(name: str, batch: int) -> str:
    """Return the name of the training with one of several global batches of an entry."""
    return f"{name}-batch{batch}"


def is_name_with_batch(name: str, entry: str) -> bool:
    """Return whether a name is that of an entry with a global batch."""
    return re.fullmatch(re.escape(entry) + r"-batch\d+", name) is not None


def known_steps(workload: WorkloadRequest, experiment: Experiment) -> int | None:
    """Return the steps of the training; None if it depends on the data set."""
    limit = first_given("max_steps", workload, experiment)
    if workload.data is not None or workload.script is not None:
        return cast("int | None", limit)
    defaults = workload_of(workload)
    if reads_dataset(workload):
        samples = workload.samples or defaults.samples
    else:
        held_out = first_given("held_out_samples", workload, experiment) or 0
        samples = max(1, (defaults.facts().items or 1) - held_out)
    batch = first_given("global_batch", workload, experiment) or defaults.global_batch
    # without epochs, max_steps alone decides: an epoch has a step at least
    epochs = first_given("epochs", workload, experiment) or limit or DEFAULT_EPOCHS
    return training_steps(samples, batch, epochs, limit)
