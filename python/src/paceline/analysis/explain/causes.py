"""Name the causes of a difference, largest first, each with its share and its evidence.

The order matters: the first rule whose evidence is there takes the parts on which its cause acts.
What no rule takes is named by its part alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.analysis.explain import conditions as evidence_of
from paceline.analysis.explain import interventions
from paceline.analysis.explain.interventions import Intervention, Propose
from paceline.analysis.explain.pair import ALLOCATED, AT_WORK, CPU_TIME, FACTOR_LABELS, Pair
from paceline.analysis.explain.parts import ON_CORES, PART_LABELS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.analysis.explain.pair import Pair

# what a lack of CPU slows down; the parts on cores count only where their factors are unknown
_ON_CORES = (CPU_TIME, AT_WORK, *ON_CORES)
_EVERYTHING = (*_ON_CORES, "data_wait", "bubble", "comm_wait", "comm_transfer")


@dataclass(frozen=True, slots=True)
class Rule:
    """A cause, the parts or factors that it slows down, and the test for its evidence."""

    name: str
    label: str
    acts_on: tuple[str, ...]
    evidence: Callable[[Pair], list[str]]  # sentences; empty if the cause cannot be named
    intervention: Propose = interventions.nothing  # the change that removes it
    # Whether time on cores that becomes shorter is its effect, too: while the training waits, its
    # readers compete less for cores. Then the cause explains the sum.
    relieves_cores: bool = False


RULES: tuple[Rule, ...] = (
    Rule("cpu_quota", "CPU quota of the control group", _EVERYTHING, evidence_of.cpu_quota),
    Rule("steal", "CPU time stolen by the hypervisor", _EVERYTHING, evidence_of.steal),
    Rule(
        "oversubscription",
        "more threads than cores",
        _EVERYTHING,
        evidence_of.oversubscription,
        interventions.threads_for_the_cores,
    ),
    Rule("slow_rank", "a slow rank (straggler)", ("comm_wait",), evidence_of.slow_rank),
    Rule("fewer_cores", "fewer allocated cores", (ALLOCATED,), evidence_of.fewer_cores),
    Rule("own_threads", "other threads of the processes (GIL)", _ON_CORES, evidence_of.own_threads),
    Rule(
        "intraop_threads",
        "threads within operations",
        (CPU_TIME, AT_WORK),
        evidence_of.intraop_threads,
        interventions.threads_of_the_faster,
    ),
    Rule("micro_batches", "smaller operations", (CPU_TIME, AT_WORK), evidence_of.micro_batches),
    Rule("frequency", "lower clock frequency", (CPU_TIME,), evidence_of.frequency),
    Rule(
        "memory_contention",
        "slower cores: memory bandwidth, caches or shared cores",
        (CPU_TIME,),
        evidence_of.memory_contention,
    ),
    Rule(
        "competition",
        "other processes competed for cores",
        (AT_WORK, *ON_CORES, "comm_wait"),
        evidence_of.competition,
    ),
    Rule(
        "cold_cache",
        "data from disks, not from the page cache",
        ("data_wait",),
        evidence_of.cold_cache,
        interventions.data_from_memory,
        relieves_cores=True,
    ),
    Rule(
        "storage",
        "slow storage",
        ("data_wait",),
        evidence_of.storage,
        interventions.data_from_memory,
        relieves_cores=True,
    ),
    Rule(
        "decoding",
        "readers compete for cores",
        ("data_wait",),
        evidence_of.decoding,
        interventions.data_from_memory,
    ),
    Rule(
        "slow_reader",
        "slow reader or remote storage",
        ("data_wait",),
        evidence_of.slow_reader,
        interventions.data_from_memory,
        relieves_cores=True,
    ),
    Rule(
        "layer_communication",
        "communication of layers (batch normalisation)",
        ("comm_transfer",),
        evidence_of.layer_communication,
        interventions.statistics_per_replica,
    ),
    Rule("transport", "another transport", ("comm_transfer",), evidence_of.transport),
    Rule(
        "more_traffic",
        "more bytes per step",
        ("comm_transfer",),
        evidence_of.more_traffic,
        interventions.half_the_bytes,
    ),
    Rule(
        "slow_link",
        "slow link",
        ("comm_transfer",),
        evidence_of.slow_link,
        interventions.half_the_bytes,
    ),
    Rule(
        "pipeline_bubble",
        "pipeline bubble",
        ("bubble",),
        evidence_of.bubble,
        interventions.more_micro_batches,
    ),
)


_LEAST_SHARE = 0.05  # of the difference: smaller causes are not named
_UNKNOWN = "the traces show no resource that explains it"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """A cause of a difference. Without a rule's evidence, it has the name of its part."""

    name: str
    label: str
    parts: tuple[str, ...]  # parts, or factors of the time on cores, that it explains
    difference_s: float  # per step
    share: float  # of the whole difference; all shares can exceed 1 where other parts are faster
    evidence: tuple[str, ...]
    has_evidence: bool  # False: only the part is known


def name_causes(pair: Pair) -> tuple[Cause, ...]:
    """Return the causes of a significant difference; none if it is not significant."""
    whole = pair.difference
    if not whole.is_significant or whole.difference_s.mean <= 0:
        return ()
    open_s = _slower_parts(pair)
    on_cores = [name for name in open_s if name in (*ON_CORES, *FACTOR_LABELS)]
    found = []
    for rule in RULES:
        taken = {name: open_s[name] for name in rule.acts_on if name in open_s}
        if not taken or sum(taken.values()) < _LEAST_SHARE * whole.difference_s.mean:
            continue
        evidence = rule.evidence(pair)
        if evidence:
            for name in taken:
                del open_s[name]
            if rule.relieves_cores and pair.same_layout and not on_cores:
                taken |= _relieved(pair)
            found.append(_cause(pair, rule.name, rule.label, taken, evidence))
    for name, seconds in _whole_parts(pair, open_s).items():
        found.append(_cause(pair, name, PART_LABELS[name], {name: seconds}, []))
    return tuple(
        sorted((c for c in found if c.share >= _LEAST_SHARE), key=lambda c: -c.difference_s)
    )


def propose_intervention(pair: Pair, causes: Sequence[Cause]) -> Intervention | None:
    """Return the change that can decide the largest cause which Paceline can remove."""
    rules = {rule.name: rule for rule in RULES}
    for cause in causes:
        if not cause.has_evidence:
            continue
        faster, slower = pair.faster, pair.slower
        change = rules[cause.name].intervention(faster.trial, slower.trial, slower.cores)
        if change is not None:
            return Intervention(
                cause=cause.name,
                cause_label=cause.label,
                label=change.label,
                trial=change.trial,
                expected_s=change.removes * cause.difference_s,
            )
    return None


def _slower_parts(pair: Pair) -> dict[str, float]:
    """Return the seconds by which each significant part is slower.

    Where the factors of the time on cores are known, they stand in for its parts, negative ones
    too: a cause that acts on several factors explains their sum.
    """
    slower = {
        part.part: part.difference_s.mean
        for part in pair.difference.parts
        if part.difference_s.low > 0
    }
    if pair.factors and any(name in slower for name in ON_CORES):
        slower = {name: seconds for name, seconds in slower.items() if name not in ON_CORES}
        slower |= {f.factor: f.difference_s for f in pair.factors}
    return slower


def _relieved(pair: Pair) -> dict[str, float]:
    """Return the seconds, below 0, by which each part on cores is significantly faster."""
    parts = [pair.difference.part(name) for name in ON_CORES]
    return {part.part: part.difference_s.mean for part in parts if part.difference_s.high < 0}


def _whole_parts(pair: Pair, open_s: dict[str, float]) -> dict[str, float]:
    """Put what is left of the factors together, under the part with the largest difference."""
    parts = {name: seconds for name, seconds in open_s.items() if name in PART_LABELS}
    rest = sum(seconds for name, seconds in open_s.items() if name not in PART_LABELS)
    if rest > 0:
        largest = max(ON_CORES, key=lambda name: pair.difference.part(name).difference_s.mean)
        parts[largest] = rest
    return parts


def _cause(
    pair: Pair, name: str, label: str, taken: dict[str, float], evidence: list[str]
) -> Cause:
    seconds = sum(taken.values())
    return Cause(
        name=name,
        label=label,
        parts=tuple(taken),
        difference_s=seconds,
        share=seconds / pair.difference.difference_s.mean,
        evidence=tuple(evidence or [_UNKNOWN]),
        has_evidence=bool(evidence),
    )
