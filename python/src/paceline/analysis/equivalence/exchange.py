"""Find out how a step's gradients came from the ranks' own ones, from linear sketches.

The used gradient of a tensor is a weighted sum of the own gradients of ranks and passes. In a
data-parallel step all weights are equal. Where they are not, they are fitted; a fit counts only if
it is exact up to rounding, measured against the magnitudes that were added.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from paceline.measure.records.own_steps import (
    OwnGradient,
    OwnStep,
    Sketch,
    TensorPart,
    UsedGradient,
)

Vector = npt.NDArray[np.float64]
Weights = dict[tuple[int, int], float]  # by rank and pass

# Residual of an exact sum, as a share of the magnitudes: many roundings of fp32, and of 16 bits.
_EXACT, _EXACT_LOW = 2e-5, 2.0**-6
_ROUNDED = 2e-2  # up to here numbers were rounded on the way
_SAME = 2e-4  # relative difference of two factors
_SUM = 2e-3  # relative difference of two sums of all elements
FEW = 4  # numbers, of which fewer show nothing alone


@lru_cache(maxsize=8192)
def numbers(sketch: Sketch) -> Vector:
    raw = np.frombuffer(base64.b64decode(sketch.numbers), dtype="<f4")
    return np.nan_to_num(raw.astype(np.float64), nan=0.0, posinf=0.0, neginf=0.0)


def near(factor: float | None, expected: float | None, within: float = _SAME) -> bool:
    if factor is None or expected is None:
        return False
    return abs(factor - expected) <= within * abs(expected)


@dataclass(slots=True, kw_only=True)
class Exchanged:
    """The way of one tensor, or of one part of it, from own gradients to the used one.

    factor: the used gradient is so many times the mean of the ranks' own ones; None if it is not
    their mean. weights: otherwise, of each rank that uses it; None where none fit.
    """

    place: TensorPart
    factor: float | None = None
    rounded: float = 0.0  # residual, as a share of the magnitudes, where it is more than rounding
    weights: dict[int, Weights | None] = field(default_factory=dict)
    is_zero: bool = False  # own gradients, of all ranks
    is_finite: bool = True
    is_distinct: bool = True  # own gradients differ between ranks
    numbers: int = 0  # that are not zero
    clipped_first: bool = False  # each rank's own gradient, before the exchange


@dataclass(frozen=True, slots=True)
class _Own:
    """The own gradients of one tensor."""

    by_pass: dict[tuple[int, int], Vector]  # rank, place of the pass
    norms: dict[tuple[int, int], float]
    low: bool

    @property
    def magnitude(self) -> float:
        return sum(self.norms.values())

    def total(self) -> Vector:
        return np.asarray(np.sum(list(self.by_pass.values()), axis=0), dtype=np.float64)

    def is_distinct(self) -> bool:
        by_rank: dict[int, Vector] = {}
        for (rank, _), each in self.by_pass.items():
            by_rank[rank] = by_rank.get(rank, np.zeros_like(each)) + each
        first, *others = by_rank.values()
        least = 1e-6 * self.magnitude
        return not others or any(float(np.linalg.norm(e - first)) > least for e in others)

    def limit(self, used: Iterable[Sketch]) -> float:
        return _EXACT_LOW if self.low or any(each.low for each in used) else _EXACT


def exchanged(steps: Mapping[int, OwnStep], ranks: int) -> list[Exchanged]:
    """Return what became of each tensor in a step; steps: of each rank."""
    own: dict[TensorPart, dict[int, OwnGradient]] = {}
    used: dict[TensorPart, dict[int, UsedGradient]] = {}
    for rank, step in steps.items():
        for gradient in step.own:
            own.setdefault(gradient.place, {})[rank] = gradient
        for each in step.used:
            used.setdefault(each.place, {})[rank] = each
    found = {
        place: _of_tensor(place, own[place], theirs, ranks)
        for place, theirs in used.items()
        if place in own and any(each.passes for each in own[place].values())
    }
    common = common_factor(found.values())
    scale = 1.0 if common is None or near(common, ranks) else common
    for place, tensor in found.items():
        # A single number is a multiple of any other one.
        if (
            tensor.is_zero
            or tensor.numbers >= FEW
            or tensor.factor is None
            or near(tensor.factor, common)
        ):
            continue
        current = _own(own[place])
        fits = {rank: _fitted(current, u.value, rank, scale) for rank, u in used[place].items()}
        if None not in fits.values():
            tensor.factor, tensor.weights = None, fits
    for place, tensor in found.items():
        if tensor.rounded and (weights := _weights_of_others(found, own, used, place)) is not None:
            tensor.factor, tensor.rounded, tensor.weights = None, 0.0, {**weights}
    return list(found.values())


def _weights_of_others(
    found: Mapping[TensorPart, Exchanged],
    own: Mapping[TensorPart, Mapping[int, OwnGradient]],
    used: Mapping[TensorPart, Mapping[int, UsedGradient]],
    place: TensorPart,
) -> Mapping[int, Weights] | None:
    """Return the weights of another tensor if they give the used gradient of this one exactly.

    It has too few numbers to fit weights to them, and with equal weights it would be rounded.
    """
    numbers = {rank: len(each.passes) for rank, each in own[place].items()}
    for other, tensor in found.items():
        weights = {rank: fit for rank, fit in tensor.weights.items() if fit is not None}
        same = numbers == {rank: len(each.passes) for rank, each in own[other].items()}
        if not same or len(weights) < len(used[place]):
            continue
        choices = (_own(own[place]), _own(own[place], every=True))
        if any(
            all(_is_sum(each, used[place][rank].value, fit) for rank, fit in weights.items())
            for each in choices
        ):
            return weights
    return None


def common_factor(found: Iterable[Exchanged]) -> float | None:
    """Return the factor of most tensors; None if no tensor is a mean of the ranks' own ones."""
    every = [each for each in found if each.factor is not None and not each.is_zero]
    wide = [each for each in every if each.numbers >= FEW] or every
    factors = [each.factor for each in wide if each.factor is not None]
    return float(np.median(factors)) if factors else None


def factor_of_shards(steps: Sequence[Sequence[OwnStep]], ranks: int) -> float | None:
    """Return the factor with which ranks step the mean of their own gradients, in shards.

    Shards are ranges of a flat copy of all weights, so that only the sum of all elements is that of
    the mean. It must have the same factor in several steps. steps: of all ranks, one after the
    other. None: not known.
    """
    if len(steps) < 2 or not _are_all_elements(steps[0]):
        return None
    means, found = [], []
    for those in steps:
        own = [each.first.total for s in those for g in s.own for each in g.current]
        used = [(u.before_clip or u.value).total for s in those for u in s.used]
        if None in own or None in used or not used:
            return None
        means.append(sum(each for each in own if each is not None) / ranks)
        found.append(sum(each for each in used if each is not None))
    mean, sums = np.array(means), np.array(found)
    factor = float(mean @ sums) / (float(mean @ mean) or 1.0)
    is_exact = np.abs(sums - factor * mean).max() <= _SUM * np.abs(factor * mean).max()
    return factor if factor and is_exact else None


def _are_all_elements(steps: Sequence[OwnStep]) -> bool:
    """Return whether the shards of all ranks have as many elements as the weights, but padding."""
    own = {each.place.name for step in steps for each in step.own}
    used = {each.place.name for step in steps for each in step.used}
    whole = sum(math.prod(each.shape) for each in steps[0].weights if each.place.name in own)
    shards = sum(
        math.prod(each.shape) for s in steps for each in s.weights if each.place.name in used
    )
    return whole <= shards <= 1.05 * whole + 64 * len(steps)


def _of_tensor(
    place: TensorPart,
    own: Mapping[int, OwnGradient],
    used: Mapping[int, UsedGradient],
    ranks: int,
) -> Exchanged:
    """Try what may have been exchanged, and what came of it, until one is the mean of the other."""
    choices = [_own(own)]
    passes = [each for gradient in own.values() for each in gradient.passes]
    same_hooks = len({gradient.hooks for gradient in own.values()}) == 1
    if same_hooks and any(each.last is not None for each in passes):
        choices.append(_own(own, last=True))
    if any(each.fresh for gradient in own.values() for each in gradient.passes[1:]):
        choices.append(_own(own, every=True))
    best: Exchanged | None = None
    for choice in choices:
        for kind in ("before_clip", "value", "after"):
            theirs = {
                rank: found
                for rank, each in used.items()
                if (found := getattr(each, kind)) is not None
            }
            if len(theirs) < len(used):
                continue
            result = _mean(place, choice, theirs, ranks)
            if result.factor is None:
                continue
            if not result.rounded:
                return result
            if best is None or result.rounded < best.rounded:
                best = result
    is_finite = all(each.value.l2 >= 0 for each in used.values())
    fits: dict[int, Weights | None] = dict.fromkeys(used)
    clipped_first = is_finite and _is_clipped_first(choices, used)
    if is_finite and not clipped_first:  # sketches of other tensors fit to everything
        fits = {rank: _first_fit(choices, each, rank) for rank, each in used.items()}
    is_low = choices[0].low or any(each.value.low for each in used.values())
    if best is not None and (is_low or None in fits.values()):
        return best
    return Exchanged(  # weights that explain the gradient exactly leave nothing to be rounded
        place=place,
        weights=fits,
        is_distinct=choices[0].is_distinct(),
        is_finite=is_finite,
        clipped_first=clipped_first,
    )


def _is_clipped_first(choices: Sequence[_Own], used: Mapping[int, UsedGradient]) -> bool:
    """Return whether ranks clip gradients of their own, and use an equal one that is no sum."""
    first = next(iter(used.values())).value
    are_equal = all(e.value.crc32 == first.crc32 for e in used.values())
    if not are_equal or any(each.before_clip is None for each in used.values()):
        return False
    return any(
        choice.is_distinct()
        and all(_is_own_clipped(choice, each, rank) for rank, each in used.items())
        for choice in choices
    )


def _is_own_clipped(own: _Own, used: UsedGradient, rank: int) -> bool:
    before = None if used.before_clip is None else _fitted(own, used.before_clip, rank)
    return before is not None and is_own(before, rank) and _fitted(own, used.value, rank) is None


def _first_fit(choices: Sequence[_Own], used: UsedGradient, rank: int) -> Weights | None:
    kept = [each for each in (used.value, used.after, used.before_clip) if each is not None]
    fits = (_fitted(choice, sketch, rank) for sketch in kept for choice in choices)
    return next((fit for fit in fits if fit is not None), None)


def _own(own: Mapping[int, OwnGradient], *, last: bool = False, every: bool = False) -> _Own:
    by_pass: dict[tuple[int, int], Vector] = {}
    norms: dict[tuple[int, int], float] = {}
    low = False
    for rank, gradient in own.items():
        for place, each in enumerate(gradient.passes if every else gradient.current):
            sketch = (each.last if last else None) or each.first
            by_pass[rank, place] = numbers(sketch)
            norms[rank, place] = max(sketch.l2, 0.0)
            low = low or sketch.low
    return _Own(by_pass, norms, low)


def _mean(place: TensorPart, own: _Own, used: Mapping[int, Sketch], ranks: int) -> Exchanged:
    """Return the factor with which the used gradient is the mean, if it is."""
    mean, scale = own.total() / ranks, own.magnitude / ranks
    result = Exchanged(
        place=place,
        is_zero=not scale,
        is_distinct=own.is_distinct(),
        numbers=int(np.count_nonzero(mean)),
    )
    vectors = [numbers(each) for each in used.values()]
    square = float(mean @ mean)
    if not square:
        result.factor = None if any(each.l2 for each in used.values()) else 1.0
        return result
    factors = [float(each @ mean) / square for each in vectors]
    factor = float(np.median(factors))
    if not factor or any(each.l2 < 0 for each in used.values()):
        return result
    residuals = [float(np.linalg.norm(each - factor * mean)) for each in vectors]
    residual = max(residuals) / (scale * abs(factor))
    exact = own.limit(used.values())
    # What was rounded on the way is the same on all ranks; what a rank scales alone is not.
    is_same = all(near(each, factors[0], 1e-6) for each in factors)
    if residual <= exact or (residual <= _ROUNDED and is_same):
        result.factor = factor
        result.rounded = residual if residual > exact else 0.0
    return result


def _fitted(own: _Own, used: Sketch, rank: int, scale: float = 1.0) -> Weights | None:
    """Return the weights of own gradients that give the used one exactly; None if none do.

    scale: by which a rank that exchanges nothing multiplies its own.
    """
    keys = list(own.by_pass)
    columns = np.array([own.by_pass[key] for key in keys]).T
    target = numbers(used)
    if not used.l2:
        return dict.fromkeys(keys, 0.0)

    for simple in ([scale * (key[0] == rank) for key in keys], [scale for _ in keys]):
        fit = dict(zip(keys, simple, strict=True))
        if _is_sum(own, used, fit):
            return fit
    lengths = np.linalg.norm(columns, axis=0)
    kept = lengths > 0
    unknown = int(kept.sum())
    if not unknown or np.count_nonzero(np.abs(columns).sum(1)) < 2 * unknown:
        return None
    solution, _, order, _ = np.linalg.lstsq(columns[:, kept] / lengths[kept], target, rcond=1e-6)
    weights = np.zeros(len(keys))
    weights[kept] = solution / lengths[kept]
    if order < unknown or not _is_sum(own, used, dict(zip(keys, weights.tolist(), strict=True))):
        return None
    least = _SAME * float(np.abs(weights).max())
    return {
        key: 0.0 if abs(value) < least else float(value)
        for key, value in zip(keys, weights, strict=True)
    }


def _is_sum(own: _Own, used: Sketch, weights: Weights) -> bool:
    """Return whether own gradients with these weights give the used one, up to roundings."""
    if weights.keys() != own.by_pass.keys():
        return False
    total = np.sum([own.by_pass[key] * weight for key, weight in weights.items()], axis=0)
    magnitude = sum(own.norms[key] * abs(weight) for key, weight in weights.items())
    return float(np.linalg.norm(total - numbers(used))) <= own.limit([used]) * magnitude


def is_own(weights: Weights, rank: int) -> bool:
    """Return whether the weights are those of a rank that uses its own gradients alone."""
    return all(bool(weight) == (key[0] == rank) for key, weight in weights.items())


def of_all_passes(weights: Sequence[Weights]) -> int:
    return max(place for fit in weights for _, place in fit) + 1
