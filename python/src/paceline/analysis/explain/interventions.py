"""Changes of a configuration that remove a cause, or a part of it, and so can test it.

A rule names what goes with a difference. If it is the cause, the slower configuration must become
faster by a known part of the cause's time once the cause is removed. If it does not, the cause is
refuted. If it does, it was this cause or another one that the same change removes: reading from
memory removes disks, readers and decoding alike. Causes outside of Paceline, such as other
processes, have no intervention.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from paceline.analysis.statistics.intervals import Mean, estimate, mean_interval
from paceline.analysis.trial.configuration import pipeline_counts
from paceline.plan.trial import Trial
from paceline.spec.extensions import STRATEGIES

Answer = Literal["supported", "refuted", "undecided", "gone"]
_LEAST_SHARE = 0.5  # of the expected time: less does not support a cause


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A changed trial, and the share of the cause's time that the change removes."""

    label: str
    trial: Trial
    removes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Intervention:
    """The change that can test a cause of an explanation."""

    cause: str
    cause_label: str
    also_removes: tuple[str, ...]  # labels of causes that it cannot tell from this one
    label: str
    trial: Trial  # of the slower configuration, changed
    expected_s: float  # by which a step must become shorter if the cause is right

    def to_json(self) -> dict[str, object]:
        """Return the intervention without its trial."""
        names = "cause", "also_removes", "label", "expected_s"
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """Result of an intervention: means of the slower configuration, per step."""

    intervention: str
    cause: str
    also_removes: tuple[str, ...]
    repeats: int
    unchanged_s: float
    changed_s: float
    saved_s: Mean
    expected_s: float
    answer: Answer


# Arguments: a trial of the faster and of the slower configuration, and the cores of the latter.
Propose = Callable[["Trial", "Trial", int], Change | None]


def threads_for_the_cores(_faster: Trial, slower: Trial, cores: int) -> Change | None:
    """Propose as many threads as there are cores, divided among the ranks and their replicas."""
    place = slower.placement
    return _threads(slower, max(1, cores // (place.ranks * place.replicas_per_rank)))


def threads_of_the_faster(faster: Trial, slower: Trial, _cores: int) -> Change | None:
    """Propose as many threads within an operation as the faster configuration has."""
    return _threads(slower, faster.placement.threads_per_worker)


def data_from_memory(_faster: Trial, slower: Trial, _cores: int) -> Change | None:
    """Propose to read and decode all samples before the first step."""
    training = slower.training
    if training.script is not None or training.reading == "memory":
        return None
    changed = training.model_copy(update={"reading": "memory"})
    return _change('data from memory: reading = "memory"', slower, training=changed)


def statistics_per_replica(_faster: Trial, slower: Trial, _cores: int) -> Change | None:
    """Propose batch normalisation without communication."""
    if slower.training.script is not None or slower.training.batch_norm == "per-replica":
        return None
    if not STRATEGIES.get(slower.local_strategy).holds_whole_model:
        return None  # it would still gather its parameters
    changed = slower.training.model_copy(update={"batch_norm": "per-replica"})
    label = 'no communication of layers: batch_norm = "per-replica"'
    return _change(label, slower, training=changed)


def more_micro_batches(_faster: Trial, slower: Trial, _cores: int) -> Change | None:
    """Propose twice as many micro-batches, which halve the bubble (s - 1) / m of the work."""
    counts = pipeline_counts(slower)
    if counts is None:
        return None
    doubled = 2 * counts[1]
    if slower.training.global_batch // slower.placement.replicas < doubled:
        return None
    options = slower.strategy_options.model_copy(update={"micro_batches": doubled})
    label = f"{doubled} micro-batches instead of {counts[1]}"
    return _change(label, slower, 0.5, strategy_options=options)


def half_the_bytes(_faster: Trial, slower: Trial, _cores: int) -> Change | None:
    """Propose gradients in bfloat16, where the transport can compress them."""
    options = slower.transport_options
    if getattr(options, "compression", options) is not None or slower.training.script is not None:
        return None
    values = {**options.model_dump(), "compression": {"method": "bf16"}}
    changed = type(options).model_validate(values)
    label = "half of the bytes: gradients in bfloat16"
    return _change(label, slower, 0.5, transport_options=changed)


def judge(
    intervention: Intervention,
    *,
    unchanged_s: Mapping[int, float],
    changed_s: Mapping[int, float],
    explained_s: tuple[float, float],
) -> Verification:
    """Decide whether the result supports the cause.

    unchanged_s, changed_s: mean steps by repeat, measured in turn. explained_s: step times of the
    faster and of the slower configuration in the explanation. If the unchanged configuration no
    longer needs at least half of the difference between the two, the cause has gone.
    """
    common = sorted(set(unchanged_s) & set(changed_s))
    before_s = np.array([unchanged_s[repeat] for repeat in common])
    after_s = np.array([changed_s[repeat] for repeat in common])
    saved = (mean_interval(before_s - after_s) or estimate(0.0, np.inf, 0)).as_mean()
    least = _LEAST_SHARE * intervention.expected_s
    answer: Answer = "undecided"
    if saved.low > 0 and saved.mean >= least:
        answer = "supported"
    elif before_s.mean() < sum(explained_s) / 2:
        answer = "gone"
    elif saved.high < least:
        answer = "refuted"
    return Verification(
        intervention=intervention.label,
        cause=intervention.cause,
        also_removes=intervention.also_removes,
        repeats=len(common),
        unchanged_s=float(before_s.mean()),
        changed_s=float(after_s.mean()),
        saved_s=saved,
        expected_s=intervention.expected_s,
        answer=answer,
    )


def _threads(slower: Trial, threads: int) -> Change | None:
    """Change the threads of each worker."""
    place = slower.placement
    if threads >= place.threads_per_worker:
        return None
    changed = place.model_copy(update={"threads_per_rank": threads * place.replicas_per_rank})
    label = f"{threads} threads within an operation instead of {place.threads_per_worker}"
    return _change(label, slower, placement=changed)


def _change(label: str, slower: Trial, removes: float = 1.0, **fields: object) -> Change:
    return Change(label=label, trial=slower.model_copy(update=fields), removes=removes)
