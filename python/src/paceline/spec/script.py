"""A workload that is a script of the user: its name, its defaults, and the rules for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.spec.descriptors import WorkloadDescriptor
from paceline.spec.evaluation import EVALUATION_KEYS
from paceline.spec.extensions import STRATEGIES, TRANSPORTS, WORKLOADS, quoted
from paceline.spec.learning_rates import LEARNING_RATE_KEYS
from paceline.spec.models import TRIAL_VALUES
from paceline.spec.transport_rules import strategy_of, transport_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from paceline.spec.models import Experiment, TrialRequest, WorkloadRequest

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
    own = {*TRIAL_VALUES, *strategy.keys_of_own_training, *transport.keys_of_own_training}
    yield from _decided_by_script(trial, sorted(own & trial.model_fields_set), "")


def _decided_by_script(values: object, keys: Iterable[str], place: str) -> Iterator[str]:
    for key in keys:
        if getattr(values, key) is not None:
            where = f"{place}.{key}" if place else key
            yield f"{where}: a script decides this itself; remove it"
