"""Compare the options of optimisers with those of the reference: learning rates before all.

Two trainings of the same rows need equal options. Before anything was trained, a difference comes
from the ranks themselves; a later one may follow from other samples, as where a schedule looks at
the loss. With other numbers of rows in a step, other learning rates may be meant (Goyal et al.,
"Accurate, large minibatch SGD", 2017, section 2.1), so they are only named.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from paceline.analysis.equivalence.own_checks import Level, RankFinding
from paceline.analysis.equivalence.trained_rows import rows_together, words_of
from paceline.measure.records.own_steps import Observed, TrainedRows, Update

_RATE, _DECAY = "lr", "weight_decay"
_EQUAL = 1e-6  # relative difference
# The optimisers of torch whose step is linear in the gradient, without weight decay.
_LINEAR = {"SGD"}

StepKey = tuple[int, int]  # optimiser and step


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionsComparison:
    """Differences from the options of the reference.

    scales: of steps with as many rows that are linear in the gradient, the learning rate over that
    of the reference, where it is the only difference. A gradient that is as many times smaller
    makes the same step.
    """

    findings: tuple[RankFinding, ...] = ()
    scales: Mapping[StepKey, float] = field(default_factory=dict)


def compared_options(
    reference: Sequence[Observed],
    ours: Sequence[Observed],
    trained: tuple[Sequence[TrainedRows], Sequence[TrainedRows]] = ((), ()),
) -> OptionsComparison:
    """Compare the options of a layout with those of the reference, step by step.

    reference, ours: of all ranks. trained: the rows of the reference and of the layout.
    """
    if not (reference and ours):
        return OptionsComparison()
    counts = list(zip(*(map(len, rows_together(each)) for each in trained), strict=False))
    known = [{(u.optimizer, u.step): u for u in found.updates} for found in ours]
    findings: dict[str, RankFinding] = {}
    scales = {}
    for theirs in reference[0].updates:
        key = theirs.optimizer, theirs.step
        own = [updates[key] for updates in known if key in updates]
        if len(own) < len(ours) or any(each.options != own[0].options for each in own):
            break  # options of ranks are compared with each other elsewhere
        rows = None
        if not theirs.optimizer and theirs.step < len(counts) and all(counts[theirs.step]):
            rows = counts[theirs.step]
        for option, words, factor in _differences(theirs, own[0], words_of(len(reference))):
            finding = _finding(option, words, factor, theirs.step, rows)
            findings.setdefault(finding.kind, finding)
        scale = _scale(theirs, own[0])
        if scale is not None and rows is not None and rows[0] == rows[1]:
            scales[key] = scale
    return OptionsComparison(findings=tuple(findings.values()), scales=scales)


def _differences(
    theirs: Update, own: Update, words: str
) -> Iterator[tuple[str, str, float | None]]:
    """Yield each option that differs first in a group, in words, with its factor."""
    if len(theirs.options) != len(own.options):
        return
    seen: set[str] = set()
    for before, now in zip(theirs.options, own.options, strict=True):
        for option in sorted(before.keys() & now.keys() - seen):
            a, b = before[option], now[option]
            if _are_equal(a, b):
                continue
            seen.add(option)
            factor = b / a if isinstance(a, float) and isinstance(b, float) and a else None
            name = "the learning rate" if option == _RATE else option
            value = f"{b:.6g}" if isinstance(b, float) else b
            if factor is None:
                yield option, f"{name} is {value}, in {words} {a}", None
            else:
                yield option, f"{name} is {value}, {factor:.4g} times that of {words}", factor


def _finding(
    option: str, words: str, factor: float | None, step: int, rows: tuple[int, int] | None
) -> RankFinding:
    level = Level.REMARK
    if rows is not None and rows[0] == rows[1]:
        level = Level.SUSPICION if step else Level.FAULT
        words += ", although a step has as many rows"
    elif rows is not None:
        words += f"; a step has {rows[1]} rows, there {rows[0]}"
    return RankFinding(
        level=level,
        kind="rate" if option == _RATE else f"option {option}",
        step=step,
        reason=words,
        factor=factor,
    )


def _scale(theirs: Update, own: Update) -> float | None:
    """Return by what a linear step multiplies the gradient more than the reference, if it does."""
    if theirs.kind != own.kind or theirs.kind not in _LINEAR:
        return None
    found = set()
    for before, now in zip(theirs.options, own.options, strict=False):
        rates = before.get(_RATE), now.get(_RATE)
        rest = [{k: v for k, v in each.items() if k != _RATE} for each in (before, now)]
        if rest[0] != rest[1] or before.get(_DECAY):
            return None
        if not all(isinstance(each, float) and each for each in rates):
            return None
        found.add(round(float(rates[1] or 0) / float(rates[0] or 1), 6))
    scale = found.pop() if len(found) == 1 else 1.0
    return None if math.isclose(scale, 1.0, rel_tol=_EQUAL) else scale


def _are_equal(a: float | str, b: float | str) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=_EQUAL)
    return a == b
