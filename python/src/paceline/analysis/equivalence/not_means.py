"""Say what gradients are that are not the mean of the ranks' own ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline.analysis.equivalence.exchange import (
    Exchanged,
    Weights,
    is_own,
    near,
    of_all_passes,
)
from paceline.analysis.equivalence.own_checks import Level, RankFinding
from paceline.analysis.equivalence.sample_log import some
from paceline.measure.records.own_steps import OwnStep


def not_means(
    wrong: Sequence[Exchanged], steps: Mapping[int, OwnStep], ranks: int
) -> list[RankFinding]:
    """Say what gradients of a step are that are not the mean of the ranks' own ones."""
    are_combined = _combines(steps)
    by_reason: dict[tuple[Level, str, float | None], list[str]] = {}
    for each in wrong:
        found = _reason(each, ranks, are_combined=are_combined)
        by_reason.setdefault(found, []).append(each.place.name)
    findings = [
        RankFinding(
            level=level,
            kind="combined" if level == Level.WEAKER else "exchange",
            step=steps[0].step,
            tensor=min(names),
            factor=factor,
            reason=reason.format(some(sorted(set(names)))),
        )
        for (level, reason, factor), names in by_reason.items()
    ]
    faults = [each for each in findings if each.level == Level.FAULT]
    return faults or findings


def is_local(each: Exchanged) -> bool:
    """Return whether all ranks use their own gradient of a tensor."""
    return all(fit is not None and is_own(fit, rank) for rank, fit in each.weights.items())


def _combines(steps: Mapping[int, OwnStep]) -> bool:
    """Return whether the gradients of a step are those of several losses of the same rows.

    Either torch.autograd.grad returns them, or each has a backward pass over these rows.
    """
    for step in steps.values():
        by_pass: dict[int, set[str]] = {}
        for each in step.rows:
            by_pass.setdefault(each.number, set()).update(each.checksums)
        have_same_rows = len(set(map(frozenset, by_pass.values()))) == 1
        numbers = [[each.number for each in own.passes] for own in step.own]
        are_returned = any(len(set(each)) < len(each) for each in numbers)
        if not (are_returned or have_same_rows):
            return False
    return True


def _reason(each: Exchanged, ranks: int, *, are_combined: bool) -> tuple[Level, str, float | None]:
    """Return level, sentence and factor for one tensor, which `{}` stands for."""
    known = {rank: fit for rank, fit in each.weights.items() if fit is not None}
    if each.clipped_first:
        return Level.FAULT, "each rank clips its own gradient of {} before the exchange", None
    if len(known) < len(each.weights) or not known:
        what = "is no weighted sum of the ranks' own ones: compressed, or changed afterwards"
        return (
            Level.NOT_SHOWN,
            f"the gradient of {{}} {what if each.is_finite else 'is not finite'}",
            None,
        )
    fits = list(known.values())
    if all(not any(fit.values()) for fit in fits):
        return Level.FAULT, "the gradient of {} is lost: it is zero after the exchange", 0.0
    if all(is_own(fit, rank) for rank, fit in known.items()):
        return Level.FAULT, "the gradient of {} is not exchanged: each rank uses its own", None
    passes = of_all_passes(fits)
    found = _of_passes(known, passes, are_combined=are_combined) if passes > 1 else None
    return found or _of_ranks(known, passes, ranks)


def _of_ranks(
    known: Mapping[int, Weights], passes: int, ranks: int
) -> tuple[Level, str, float | None]:
    """Say by how much the weights of ranks differ, or the ranks that use the gradient."""
    by_rank = [_sums(fit, 0) for fit in known.values()]
    totals = [sum(each.values()) / passes for each in by_rank]
    if all(near(w, next(iter(those.values()))) for those in by_rank for w in those.values()):
        if all(near(each, totals[0]) for each in totals):
            return Level.FAULT, f"the gradient of {{}} is {totals[0]:.3g} times the mean", totals[0]
        words = ", ".join(f"{t:.3g} on rank {r}" for r, t in zip(known, totals, strict=True))
        what = f"ranks multiply the mean gradient of {{}} differently: {words}"
        return Level.FAULT, what, max(totals) / min(totals) if min(totals) > 0 else None
    means = [rank for rank, those in zip(known, by_rank, strict=True) if _is_even(those)]
    if 0 < len(means) < len(by_rank):
        return Level.FAULT, f"only rank {some(means)} uses the mean of the gradients of {{}}", None
    words = ", ".join(f"{w * ranks / passes:.3g} (rank {r})" for r, w in by_rank[0].items())
    what = f"own gradients of {{}} have unequal weights in the mean: {words}"
    return Level.FAULT, f"{what}; scaled or clipped before the exchange", None


def _is_even(weights: Mapping[int, float]) -> bool:
    first = next(iter(weights.values()))
    return bool(first) and all(near(each, first) for each in weights.values())


def _of_passes(
    known: Mapping[int, Weights], passes: int, *, are_combined: bool
) -> tuple[Level, str, float | None] | None:
    """Say which accumulated passes are not exchanged, or count more than others."""
    alone = [
        place + 1
        for place in range(passes)
        if all(is_own(_of_pass(fit, place), rank) for rank, fit in known.items())
    ]
    if alone and len(alone) < passes:
        return Level.FAULT, f"the gradient of {{}} is not exchanged in pass {some(alone)}", None
    by_pass = _sums(next(iter(known.values())), 1)
    last = by_pass[max(by_pass)]
    counts = " : ".join(f"{weight / (last or 1.0):.3g}" for weight in by_pass.values())
    by_rank = [_sums(_of_pass(fit, n), 0) for fit in known.values() for n in range(passes)]
    if are_combined and all(map(_is_even, by_rank)):
        what = f"the gradients of several losses are combined in that of {{}} ({counts})"
        return Level.WEAKER, what, None
    if any(not near(weight, last, 1e-2) for weight in by_pass.values()):
        what = f"accumulated passes have unequal weights in the gradient of {{}} ({counts})"
        return Level.FAULT, what, None
    return None


def _of_pass(fit: Weights, place: int) -> Weights:
    return {key: weight for key, weight in fit.items() if key[1] == place}


def _sums(fit: Weights, part: int) -> dict[int, float]:
    """Return the weights by rank (part 0) or by pass (part 1)."""
    found: dict[int, float] = {}
    for key, weight in fit.items():
        found[key[part]] = found.get(key[part], 0.0) + weight
    return found
