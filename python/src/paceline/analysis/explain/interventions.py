"""Changes of a configuration that remove a cause, or a part of it, and so can decide it.

A rule names what goes with a difference. If it is the cause, the slower configuration must become
faster by a known part of the cause's time once the cause is removed. Causes outside of Paceline,
such as other processes, have no intervention.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from paceline.analysis.explain.difference import difference
from paceline.analysis.trial.configuration import pipeline_counts

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paceline.analysis.explain.difference import PartNoise
    from paceline.analysis.explain.parts import TrialParts
    from paceline.analysis.statistics.intervals import Mean
    from paceline.plan.trial import Trial

Answer = Literal["confirmed", "refuted", "undecided", "gone"]
UNCHANGED, CHANGED = "unchanged", "changed"  # names of the two sides
_LEAST_SHARE = 0.5  # of the expected time: less does not confirm a cause


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A changed trial, and the share of the cause's time that the change removes."""

    label: str
    trial: Trial
    removes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Intervention:
    """The change that can decide a cause of an explanation."""

    cause: str
    cause_label: str
    label: str
    trial: Trial  # of the slower configuration, changed
    expected_s: float  # by which a step must become shorter if the cause is right

    def to_json(self) -> dict[str, str | float]:
        """Return the intervention without its trial."""
        return {"cause": self.cause, "label": self.label, "expected_s": self.expected_s}


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """Result of an intervention: means of the slower configuration, per step."""

    intervention: str
    cause: str
    repeats: int
    unchanged_s: float
    changed_s: float
    saved_s: Mean
    expected_s: float
    answer: Answer


# Arguments: a trial of the faster and of the slower configuration, and the cores of the latter.
Propose = Callable[["Trial", "Trial", int], Change | None]


def nothing(_faster: Trial, _slower: Trial, _cores: int) -> Change | None:
    """Propose nothing: Paceline cannot remove the cause."""
    return None


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
    return Change(
        label='data from memory: reading = "memory"',
        trial=slower.model_copy(update={"training": changed}),
        removes=1.0,
    )


def statistics_per_replica(_faster: Trial, slower: Trial, _cores: int) -> Change | None:
    """Propose batch normalisation without communication."""
    if slower.training.script is not None or slower.training.batch_norm == "per-replica":
        return None
    changed = slower.training.model_copy(update={"batch_norm": "per-replica"})
    return Change(
        label='no communication of layers: batch_norm = "per-replica"',
        trial=slower.model_copy(update={"training": changed}),
        removes=1.0,
    )


def more_micro_batches(_faster: Trial, slower: Trial, _cores: int) -> Change | None:
    """Propose twice as many micro-batches, which halve the bubble (s - 1) / m of the work."""
    counts = pipeline_counts(slower)
    if counts is None:
        return None
    doubled = 2 * counts[1]
    if slower.training.global_batch // slower.placement.replicas < doubled:
        return None
    options = slower.strategy_options.model_copy(update={"micro_batches": doubled})
    return Change(
        label=f"{doubled} micro-batches instead of {counts[1]}",
        trial=slower.model_copy(update={"strategy_options": options}),
        removes=0.5,
    )


def half_the_bytes(_faster: Trial, slower: Trial, _cores: int) -> Change | None:
    """Propose gradients in bfloat16, where the transport can compress them."""
    options = slower.transport_options
    if getattr(options, "compression", options) is not None or slower.training.script is not None:
        return None
    values = {**options.model_dump(), "compression": {"method": "bf16"}}
    return Change(
        label="half of the bytes: gradients in bfloat16",
        trial=slower.model_copy(update={"transport_options": type(options).model_validate(values)}),
        removes=0.5,
    )


def judge(
    intervention: Intervention,
    *,
    unchanged: Mapping[int, TrialParts],
    changed: Mapping[int, TrialParts],
    noise: Mapping[str, PartNoise],
    explained_s: tuple[float, float],
) -> Verification:
    """Decide whether the cause is confirmed.

    unchanged, changed: parts by repeat, measured in turn. noise: with these names. explained_s:
    step times of the faster and of the slower configuration in the explanation. If the unchanged
    configuration no longer needs at least half of the difference between the two, the cause has
    gone.
    """
    found = difference(changed, unchanged, noise, (CHANGED, UNCHANGED))
    saved = found.difference_s
    least = _LEAST_SHARE * intervention.expected_s
    faster_s, slower_s = explained_s
    answer: Answer = "undecided"
    if saved.low > 0 and saved.mean >= least:
        answer = "confirmed"
    elif found.slower_s < (faster_s + slower_s) / 2:
        answer = "gone"
    elif saved.high < least:
        answer = "refuted"
    return Verification(
        intervention=intervention.label,
        cause=intervention.cause,
        repeats=found.repeats,
        unchanged_s=found.slower_s,
        changed_s=found.faster_s,
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
    return Change(
        label=f"{threads} threads within an operation instead of {place.threads_per_worker}",
        trial=slower.model_copy(update={"placement": changed}),
        removes=1.0,
    )
