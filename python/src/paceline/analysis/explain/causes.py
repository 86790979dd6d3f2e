"""Name the causes of a difference, largest first, each with its share and its evidence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.analysis.explain.factors import FACTOR_LABELS
from paceline.analysis.explain.interventions import Intervention
from paceline.analysis.explain.parts import ON_CORES, PART_LABELS
from paceline.analysis.explain.rules import RULES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.analysis.explain.pair import Pair

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
