"""The weights of rows in a step, from the terms of the ranks' losses.

The loss is the mean over all ranks' rows if the elements of each term have the same weight on all
ranks, and all weights together are 1. A term's weight is the gradient that arrives at it, times
what the exchange and the scaling of the loss make of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from paceline.analysis.equivalence.exchange import near
from paceline.analysis.equivalence.own_checks import Level, RankFinding
from paceline.analysis.equivalence.sample_log import some
from paceline.measure.records.own_steps import LossTerm, OwnStep, fed_rows

_EQUAL = 1e-4  # relative difference of two weights of rows
_ONE = 1e-3
# A sum is divided by nearly the number of its elements, such as with the first labels of sentences.
_NEARLY_ONE = (0.8, 1.25)
# Kinds of findings about the weights of all rows together, and that the learning rate answers them.
_TOTALS = {"summed", "passes", "total"}
MADE_UP = "made-up"
_MANY_TERMS = 8  # in a pass: the loss has a term for each row
_WORDS = {"NllLoss": "cross entropy", "NllLoss2D": "cross entropy", "MseLoss": "MSE"}


def row_weights(
    steps: Mapping[int, OwnStep], factor: float, ranks: int, scale: float | None = None
) -> list[RankFinding]:
    """Compare the weights that the losses of ranks give to their rows.

    factor: the used gradient is so many times the mean of the ranks' own ones. scale: by which the
    learning rate of a linear step is that of the reference, which may make up for another sum of
    weights; None: it is the same.
    """
    every = list(steps.values())
    found = list(_RowWeights(every, factor, ranks).findings())
    totals = [each for each in found if each.kind in _TOTALS]
    if scale is None or not totals or any(u.before_clip for each in every for u in each.used):
        return found
    scaled = list(_RowWeights(every, factor * scale, ranks).findings())
    if any(each.kind in _TOTALS for each in scaled):
        return found
    reason = (
        f"the weights of all rows add up to {1 / scale:.3g}, and the learning rate is {scale:.3g} "
        "times that of the reference, which makes the same step"
    )
    made_up = RankFinding(level=Level.REMARK, kind=MADE_UP, step=every[0].step, reason=reason)
    return [*scaled, made_up]


class _RowWeights:
    def __init__(self, steps: Sequence[OwnStep], factor: float, ranks: int) -> None:
        self._steps, self._factor, self._ranks = steps, factor, ranks
        self._first = steps[0]
        self._mean = factor * self._first.scale  # 1: the used gradient is the mean

    def findings(self) -> Iterator[RankFinding]:
        yield from self._gathered()
        if all(each.mixes_rows for each in self._steps):
            reason = "the loss combines rows with each other, so it is no mean over rows"
            yield self._finding(Level.WEAKER, "mixed-rows", reason)
        terms = [each.terms for each in self._steps]
        kinds = [[each.kind for each in those] for those in terms]
        if (dropped := self._dropped()) is not None:
            yield dropped
        elif not all(terms):
            yield self._finding(Level.WEAKER, "no-terms", "the terms of the loss are not known")
            yield from self._of_factor_alone()
        elif len(kinds[0]) > _MANY_TERMS * max(1, len(self._first.passes)):
            yield from self._many(terms)
        elif any(each != kinds[0] for each in kinds):
            yield from self._of_counts()
        else:
            yield from self._aligned(list(zip(*terms, strict=True)))

    def _finding(
        self, level: Level, kind: str, reason: str, factor: float | None = None
    ) -> RankFinding:
        return RankFinding(
            level=level, kind=kind, step=self._first.step, reason=reason, factor=factor
        )

    def _gathered(self) -> Iterator[RankFinding]:
        crossed = sorted({name for each in self._steps for name in each.crossed})
        if crossed:
            reason = f"{some(crossed)} takes rows of all ranks, so the loss is no sum over rows"
            yield self._finding(Level.WEAKER, "gathered", reason)
        lost = sorted({name for each in self._steps for name in each.gathered})
        if not self._has_own_rows():  # parts of a layer are summed so in tensor parallelism
            lost = [name for name in lost if name != "all_reduce"]
        if not lost:
            return
        if all(self._is_whole(each) for each in self._steps):
            reason = "the loss uses rows of all ranks, so it is no sum over rows"
            yield self._finding(Level.WEAKER, "gathered", reason)
        else:
            reason = (
                "the loss uses rows of other ranks without their gradient, which "
                f"torch.distributed.{lost[0]} loses"
            )
            yield self._finding(Level.SUSPICION, "gathered", reason)

    def _has_own_rows(self) -> bool:
        """Return whether each rank has rows, and no other rank has the same."""
        rows = {tuple(c for r in each.rows for c in r.checksums) for each in self._steps}
        return len(rows) == self._ranks and () not in rows

    def _is_whole(self, step: OwnStep) -> bool:
        """Return whether a rank computes the loss of all rows, and makes up for the mean."""
        rows = sum(len(each.checksums) for each in step.rows)
        return any(
            near(each.gradient * self._factor, self._ranks, _ONE)
            and each.elements >= self._ranks * rows / 2
            for each in step.terms
            if each.is_mean
        )

    def _many(self, terms: Sequence[Sequence[LossTerm]]) -> Iterator[RankFinding]:
        weights = [float(np.median([each.gradient for each in those])) for those in terms]
        if any(not near(each, weights[0], _EQUAL) for each in weights):
            reason = "the terms of the ranks' losses have different weights"
            yield self._finding(Level.WEAKER, "terms", reason)

    def _aligned(self, aligned: Sequence[Sequence[LossTerm]]) -> Iterator[RankFinding]:
        kinds = Counter(each[0].kind for each in aligned)
        unequal = [f for e in aligned if (f := self._unequal(e, kinds[e[0].kind])) is not None]
        if unequal and (shared := _shared(aligned)) is not None:
            reason = (
                f"terms of the loss ({_word(shared)}) share the rows in other parts on each rank, "
                "and have equal weights together, as for mixed rows"
            )
            yield self._finding(Level.WEAKER, "terms", reason)
            return
        if unequal:
            yield next((each for each in unequal if each.level == Level.FAULT), unequal[0])
            return
        unknown = sorted({_word(e.kind) for each in aligned for e in each if e.is_mean is None})
        if unknown:
            reason = f"the term {some(unknown)} of the loss is not known to be a mean over rows"
            yield self._finding(Level.WEAKER, "unknown-term", reason)
        known = [each for each in aligned if all(e.is_mean is not None for e in each)]
        if known:
            yield from self._totals(known)
        else:
            yield from self._of_factor_alone()

    def _dropped(self) -> RankFinding | None:
        """Find a rank that empties gradients between passes of a step, which others add up.

        Passes that are emptied before any step, as of a test, are no such ones.
        """
        added: list[set[int]] = []
        lost: list[set[int]] = []
        for step in self._steps:
            current = {each.number for own in step.own for each in own.current}
            every = {e.number for own in step.own for e in own.passes if e.first.l2 > 0}
            added.append(current)
            lost.append(every - current)
        most = max(map(len, added))
        rank = next((r for r, each in enumerate(lost) if each and len(added[r]) < most), None)
        if rank is None or near(self._total_of_passes(), 1.0, _ONE):
            return None
        other = next(r for r, each in enumerate(added) if len(each) == most)
        reason = (
            f"rank {rank} steps with the gradients of {len(added[rank])} of its "
            f"{len(added[rank]) + len(lost[rank])} backward passes, rank {other} with those of "
            f"{most}: it empties them between passes"
        )
        return self._finding(Level.FAULT, "passes", reason)

    def _total_of_passes(self) -> float | None:
        """Return the weights of all rows together if each pass has one known term."""
        terms = [each for step in self._steps for each in step.terms]
        numbers = sum(len({each.number for each in step.terms}) for step in self._steps)
        if len(terms) != numbers or any(each.is_mean is None for each in terms):
            return None
        return abs(_total(terms)) * self._factor / self._ranks

    def _of_counts(self) -> Iterator[RankFinding]:
        """Compare terms of ranks that have other numbers of passes, each with the same terms."""
        by_pass = [_by_pass(each.terms) for each in self._steps]
        kinds = {tuple(e.kind for e in terms) for each in by_pass for terms in each}
        if len(kinds) > 1 or len({len(each) for each in by_pass}) == 1:
            yield self._finding(Level.WEAKER, "terms", "the losses of ranks have different terms")
            return
        counts = ", ".join(f"{len(each)} on rank {rank}" for rank, each in enumerate(by_pass))
        for place, kind in enumerate(kinds.pop()):
            every = [[terms[place] for terms in each] for each in by_pass]
            means = [float(np.mean([_weight(e) for e in each])) for each in every]
            is_known = all(e.is_mean is not None and e.is_linear for each in every for e in each)
            is_even = all(
                near(_weight(e), mean, _EQUAL)
                for each, mean in zip(every, means, strict=True)
                for e in each
            )
            if not (is_known and is_even):
                yield self._finding(Level.WEAKER, "terms", "the losses of ranks have other terms")
                return
            if any(not near(each, means[0], _EQUAL) for each in means):
                shown = " and ".join(f"{each:.3g}" for each in means[:4])
                reason = (
                    f"ranks step after different numbers of backward passes ({counts}), and "
                    f"samples have unequal weights in the loss ({_word(kind)}): {shown}"
                )
                factor = max(means) / min(means) if min(means) > 0 else None
                yield self._finding(Level.FAULT, "terms", reason, factor)
                return
        total = self._total_of_passes()
        if not near(total, 1.0, _ONE):
            what = "are not known to add up to 1" if total is None else f"add up to {total:.3g}"
            yield self._finding(Level.WEAKER, "total", f"the weights of all rows {what}")

    def _unequal(self, each: Sequence[LossTerm], like: int) -> RankFinding | None:
        """Return what is wrong with a term whose elements have other weights on other ranks.

        like: terms of its kind in the step.
        """
        weights = [_weight(e) for e in each]
        if any(e.is_mean is None for e in each) or all(
            near(w, weights[0], _EQUAL) for w in weights
        ):
            return None
        word = _word(each[0].kind)
        if not all(e.is_linear for e in each):
            reason = f"the loss is not linear in its term {word}, so it is no mean over all rows"
            return self._finding(Level.WEAKER, "not-linear", reason)
        if not all(weights):
            return self._finding(Level.SUSPICION, "terms", f"the term {word} is zero on some ranks")
        if each[0].is_mean and all(near(e.gradient, each[0].gradient, _EQUAL) for e in each):
            counts = " and ".join(f"{e.elements:g}" for e in each[:4])
            if like > max(1, len(self._first.passes)):  # each may be one sample of its own size
                reason = f"terms of the loss ({word}) are means of {counts} elements on the ranks"
                return self._finding(Level.WEAKER, "terms", reason)
            if self._have_equal_rows(each):
                reason = (
                    f"rows have equal weights in the loss, but their elements have not: the term "
                    f"{word} is a mean of {counts} elements on the ranks"
                )
                return self._finding(Level.WEAKER, "terms", reason)
            reason = (
                f"each rank takes the mean of its own {counts} elements ({word}), and all ranks "
                "count the same: samples have unequal weights"
            )
        else:
            shown = " and ".join(f"{w:.3g}" for w in weights[:4])
            reason = f"samples have unequal weights in the loss ({word}): {shown}"
        low = min(weights)
        return self._finding(Level.FAULT, "terms", reason, max(weights) / low if low > 0 else None)

    def _have_equal_rows(self, each: Sequence[LossTerm]) -> bool:
        """Return whether ranks have as many rows, each of as many elements as others on its rank.

        Such as images of a size of the step, or sounds that are as long as the longest one.
        """
        rows = [_rows_of_pass(step, e.number) for step, e in zip(self._steps, each, strict=True)]
        is_whole = not any(e.leaves_out or e.elements % (rows[0] or 1) for e in each)
        return is_whole and len(set(rows)) == 1 and rows[0] > 0

    def _totals(self, known: Sequence[Sequence[LossTerm]]) -> Iterator[RankFinding]:
        """Compare the weight of all rows together with 1."""
        of_pass = [e[0].number for e in known]
        numbers = sorted(set(of_pass))
        ways = self._ways(known)
        values = ways[0]
        sites = {each.site for each in self._first.passes if each.number in numbers}
        accumulates = len(numbers) > 1 and _rows_differ(self._first)
        # Sums of one kind may be those of parts of the rows.
        is_parts = _are_sums(known) and len({e[0].kind for e in known}) == 1
        of_terms = sum if is_parts else max
        every_way = [
            sum(
                of_terms([t for n, t in zip(of_pass, way, strict=True) if n == number])
                for number in numbers
            )
            for way in ways
        ]
        together = every_way[0]
        if accumulates and len(sites) == 1:
            if not any(near(each, 1.0, _ONE) for each in every_way):
                is_sum = _are_sums(known)
                yield from self._of_passes(together, len(numbers), is_sum=is_sum)
            return
        every = [total for way in (*ways, every_way if is_parts else []) for total in way]
        if any(near(each, 1.0, _ONE) for each in every):
            return
        # A script may also accumulate passes over the same rows, which have the same terms then.
        kinds = {
            tuple((e[0].kind, e[0].elements) for e in known if e[0].number == number)
            for number in numbers
        }
        is_repeated = len(kinds) == 1 < len(numbers)
        if near(together, 1.0, _ONE) and (accumulates or is_repeated):
            return
        if accumulates or is_parts:
            values = [together]
        elif len(values) > 1 and near(self._mean, 1.0) and near(sum(values), 1.0, _ONE):
            reason = f"the loss is the weighted mean of {len(values)} terms"
            yield self._finding(Level.REMARK, "total", reason)
            return
        ranks = self._ranks
        if near(self._mean, ranks) and any(near(each, ranks, _ONE) for each in every):
            reason = f"gradients are summed over {ranks} ranks instead of averaged"
            yield self._finding(Level.FAULT, "summed", reason, float(ranks))
        elif near(self._mean, 1 / ranks) and any(near(e, 1 / ranks, _ONE) for e in every):
            reason = f"gradients are divided by {ranks} once too often"
            yield self._finding(Level.FAULT, "summed", reason, 1 / ranks)
        elif _are_sums(known):
            yield self._of_sum(values)
        elif accumulates and near(together, 1 / ranks, _ONE):
            yield self._of_all_passes(len(numbers))
        elif any(near(each, w, _ONE) for each in values for w in (ranks, 1 / ranks)):
            reason = f"the weights of all rows add up to {values[0]:.3g}"
            yield self._finding(Level.WEAKER, "total", reason)
        elif len(values) == 1:
            yield self._finding(Level.REMARK, "total", f"the loss is multiplied by {values[0]:.3g}")

    def _ways(self, known: Sequence[Sequence[LossTerm]]) -> list[list[float]]:
        """Return the weights of all rows together of each term, in each way to count them.

        A sum may be one over rows, of several numbers each, that is divided by the rows alone. What
        multiplies its numbers may be a mask, or weights of rows by which it is not divided.
        """
        plain = [[replace(e, elements=e.numbers or e.elements) for e in each] for each in known]
        # A mean may also be made larger: its weights are negative.
        counts = [
            [abs(_total(e)) * self._factor / self._ranks for e in terms] for terms in (known, plain)
        ]
        of_rows = [
            [t / self._elements_of_row(e) for t, e in zip(totals, terms, strict=True)]
            for totals, terms in zip(counts, (known, plain), strict=True)
        ]
        return [*counts, *of_rows]

    def _elements_of_row(self, each: Sequence[LossTerm]) -> float:
        """Return how many elements of a sum each row has, on all ranks; 1 if that is not known."""
        rows = [_rows_of_pass(step, e.number) for step, e in zip(self._steps, each, strict=True)]
        pairs = list(zip(each, rows, strict=True))
        if any(e.is_mean or not r or e.elements % r for e, r in pairs):
            return 1.0
        of_row = {e.elements / r for e, r in pairs}
        return of_row.pop() if len(of_row) == 1 else 1.0

    def _of_sum(self, totals: Sequence[float]) -> RankFinding:
        """Say what sums add up to. A single one may be divided by nearly its number of elements."""
        least, most = _NEARLY_ONE
        reason = f"the weights of all rows add up to {totals[0]:.3g}"
        if len(totals) == 1 and least < totals[0] < most:
            return self._finding(Level.REMARK, "total", reason)
        return self._finding(Level.WEAKER, "total", f"{reason}: the loss is not known to be a mean")

    def _of_passes(self, total: float, passes: int, *, is_sum: bool) -> Iterator[RankFinding]:
        if near(total, passes, _ONE) and near(self._mean, 1.0):
            reason = f"gradients of {passes} accumulated passes are not divided by their number"
            yield self._finding(Level.FAULT, "passes", reason, float(passes))
        elif near(total, 1 / self._ranks, _ONE) and near(self._mean, 1.0):
            yield self._of_all_passes(passes)
        elif is_sum and not near(total, 1.0, _ONE):
            yield self._of_sum([total])
        elif not near(total, 1.0, _ONE):
            reason = f"the weights of all rows of {passes} passes add up to {total:.3g}"
            yield self._finding(Level.WEAKER, "passes", reason)

    def _of_all_passes(self, passes: int) -> RankFinding:
        reason = (
            f"the weights of all rows of {passes} passes add up to 1/{self._ranks}: each pass may "
            "be divided by the passes of all ranks"
        )
        return self._finding(Level.SUSPICION, "passes", reason, 1 / self._ranks)

    def _of_factor_alone(self) -> Iterator[RankFinding]:
        for factor, words in ((float(self._ranks), "sum"), (1 / self._ranks, "mean, divided")):
            if near(self._mean, factor):
                reason = (
                    f"gradients are the {words} of the ranks' own ones; right only if the loss "
                    "makes up for it"
                )
                yield self._finding(Level.SUSPICION, "summed", reason, factor)


def _shared(aligned: Sequence[Sequence[LossTerm]]) -> str | None:
    """Return the kind of several terms that have equal weights only together, if there is one.

    All others have equal weights by themselves.
    """
    found: set[str] = set()
    groups: dict[tuple[int, str], list[Sequence[LossTerm]]] = {}
    for each in aligned:
        groups.setdefault((each[0].number, each[0].kind), []).append(each)
    for (_, kind), those in groups.items():
        sizes = {e.elements for each in those for e in each}
        weights = [sum(_weight(e) for e in of_rank) for of_rank in zip(*those, strict=True)]
        is_known = all(e.is_mean is not None and e.is_linear for each in those for e in each)
        if not is_known or not all(near(w, weights[0], _EQUAL) for w in weights):
            return None
        if any(not near(_weight(e), _weight(each[0]), _EQUAL) for each in those for e in each):
            if len(sizes) > 1:
                return None
            found.add(kind)
    return min(found, default=None)


def _are_sums(terms: Sequence[Sequence[LossTerm]]) -> bool:
    return all(not each.is_mean for those in terms for each in those)


def _rows_differ(step: OwnStep) -> bool:
    """Return whether each pass has rows of its own."""
    by_pass: dict[int, set[str]] = {}
    for each in step.rows:
        by_pass.setdefault(each.number, set()).update(each.checksums)
    every = list(by_pass.values())
    return bool(every) and len(set().union(*every)) == sum(map(len, every))


def _rows_of_pass(step: OwnStep, number: int) -> int:
    rows = fed_rows([each for each in step.rows if each.number == number])
    return sum(len(each.checksums) for each in rows)


def _by_pass(terms: Sequence[LossTerm]) -> list[list[LossTerm]]:
    found: dict[int, list[LossTerm]] = {}
    for each in terms:
        found.setdefault(each.number, []).append(each)
    return list(found.values())


def _weight(term: LossTerm) -> float:
    return term.gradient / term.elements if term.is_mean and term.elements else term.gradient


def _total(each: Sequence[LossTerm]) -> float:
    """Return the weights of all elements of a term together, on all ranks."""
    return sum(e.gradient if e.is_mean else e.gradient * e.elements for e in each)


def _word(kind: str) -> str:
    name = kind.partition("Backward")[0]
    return _WORDS.get(name, name)
