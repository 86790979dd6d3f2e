"""Judge the rows of a whole training: of the ranks against each other, and with one process.

Only exact evidence is a fault: rows that are random views of samples differ in every training, and
samples may be drawn with replacement, in another order, or with a few repeated ones as padding.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain

import numpy as np
import numpy.typing as npt

from paceline.analysis.equivalence.own_checks import Level, RankFinding
from paceline.measure.records.own_steps import Observed, TrainedRows, Update

_CHANCE = 1e-6  # of a right training that looks like a wrong one
_MIXED_STEPS = 2
_SAME_PLACES = 3  # steps
_EQUAL = 1e-4  # relative difference of numbers that are added in another order
_SHIFTED = 1e-4  # relative difference of numbers from those that were shifted or multiplied
_LEAST_EVIDENCE = 8  # numbers that these explain

Numbers = npt.NDArray[np.float64]

Steps = Sequence[Sequence[int]]  # checksums of the rows of each step


def judge_rows(
    ranks: Sequence[TrainedRows], reference: Sequence[TrainedRows] = ()
) -> list[RankFinding]:
    """Compare the rows of ranks with each other, and with those of the reference.

    reference: one process, or several ranks; empty: none.
    """
    own, theirs = ([each.steps for each in records] for records in (ranks, reference))
    if len(own) < 2 or not _are_known(own):
        return []
    together = [_of_step(step) for step in zip(*own, strict=False)]
    other = [_of_step(s) for s in zip(*theirs, strict=False)] if _are_known(theirs) else []
    first, words = _first_other(together, other), words_of(len(theirs))
    found = _of_ranks(own, first)
    if other and found is None:
        found = _of_orders(together, other, first, len(own), words)
    if other and found is None:
        found = _of_places(own, other, words)
    if other and found is None and all(each.is_whole for each in (*ranks, *reference)):
        found = _of_counts(together, other, first, words)
    return [] if found is None else [found]


def later_other_step(ranks: Sequence[TrainedRows], compared: int) -> tuple[int, int] | None:
    """Return a step with other numbers of rows than the first ones, and how many follow from it on.

    It is the last one after the steps that are compared, if these have equal numbers, or if ranks
    have different ones in it. None if there is none.
    """
    counts = list(zip(*(each.lengths for each in ranks), strict=False))
    known = set(counts[:compared])
    other = [
        step
        for step, rows in enumerate(counts)
        if step >= compared and all(rows) and rows not in known
        if len(known) == 1 or len(set(rows)) > 1
    ]
    return (other[-1], len(counts) - other[-1]) if other else None


def changed_rows(
    ranks: tuple[Sequence[TrainedRows], Sequence[Observed]],
    reference: tuple[Sequence[TrainedRows], Sequence[Observed]],
) -> list[RankFinding]:
    """Find rows that no step of the reference has, although both draw the same random numbers.

    Then they are computed from something else, as from moments of the rows of each rank. Batches of
    a DataLoader are known themselves, so `judge` compares what becomes of them.
    """
    (own, observed), (theirs, one) = ranks, reference
    if not (observed and one and _are_known([e.steps for e in own])):
        return []
    updates = list(zip(*(each.updates for each in (*observed, *one)), strict=False))
    known = set(chain.from_iterable(chain.from_iterable(each.steps for each in theirs)))
    rows = {int(row, 16) for step in updates for row in step[len(observed)].samples or ()}
    if not (rows and rows <= known):  # batches, not inputs of the model
        return []
    first = set(chain.from_iterable(chain(*(each.steps[: len(updates)] for each in own))))
    is_random = any(each.generators != step[0].generators for step in updates for each in step)
    if is_random or first & known:
        return []
    reason = (
        f"no row that the model gets is one of {words_of(len(one))}, although nothing random "
        "differs: what is done to rows before was not compared"
    )
    return [RankFinding(level=Level.WEAKER, kind="changed-rows", step=0, reason=reason)]


def shifted_rows(theirs: Update, own: Sequence[Update]) -> str | None:
    """Return how rows of a step differ if they are those of the reference, shifted or multiplied.

    Each number of a row has a shift and a factor of its own. Random changes are left out.
    """
    whole, *parts = (np.array(each.inputs) for each in (theirs, *own))
    if any(each.generators != theirs.generators for each in own):
        return None
    if any(each.ndim != 2 or each.shape[1] != whole.shape[1] for each in (whole, *parts)):
        return None
    for pairs in _shares(whole, parts):
        changed = [_is_shifted(before, after) for before, after in pairs]
        if None not in changed and any(changed):
            return (
                "rows that the model gets are those of the reference, but shifted or multiplied, "
                "as by moments that each rank computes of its own rows"
            )
    return None


def _shares(whole: Numbers, parts: Sequence[Numbers]) -> Iterator[list[tuple[Numbers, Numbers]]]:
    """Yield the ways in which ranks may share the rows of the reference, as pairs of rows."""
    ranks, sizes = len(parts), [len(each) for each in parts]
    if sum(sizes) != len(whole):
        return
    yield [(whole[rank::ranks], part) for rank, part in enumerate(parts)]
    ends = np.cumsum(sizes)
    yield list(zip(np.split(whole, ends[:-1]), parts, strict=True))


def _is_shifted(before: Numbers, after: Numbers) -> bool | None:
    """Return whether each number is changed by a factor and a shift of its own; None if neither.

    False: rows are equal.
    """
    if before.shape != after.shape:
        return None
    scale = float(np.abs(before).max(initial=0.0)) or 1.0
    if float(np.abs(before - after).max(initial=0.0)) <= _EQUAL * scale:
        return False
    varied = [n for n in range(before.shape[1]) if len(set(before[:, n])) > len(before) / 2]
    if len(varied) < 2 or (len(before) - 2) * len(varied) < _LEAST_EVIDENCE:
        return None
    for number in varied:
        x, y = before[:, number] - before[:, number].mean(), after[:, number]
        y = y - y.mean()
        rest = y - (x @ y) / (x @ x) * x
        if np.linalg.norm(rest) > _SHIFTED * np.linalg.norm(y) or not y.any():
            return None
    return True


def rows_of_steps(
    reference: Sequence[TrainedRows], ranks: Sequence[TrainedRows]
) -> list[list[list[int]]]:
    """Return the rows of each step: of the reference, then of each rank; see `samples_fault`."""
    one = rows_together(reference)
    return [list(step) for step in zip(one, *(each.steps for each in ranks), strict=False)]


def rows_together(ranks: Sequence[TrainedRows]) -> list[list[int]]:
    """Return the rows of all ranks in each step, once where ranks have the same ones."""
    return [_of_step(step) for step in zip(*(each.steps for each in ranks), strict=False)]


def words_of(ranks: int) -> str:
    """Return what a reference of so many ranks is called."""
    return "one process" if ranks <= 1 else f"{ranks} ranks"


def _are_known(ranks: Sequence[Steps]) -> bool:
    return bool(ranks) and all(steps and all(steps) for steps in ranks)


def _of_step(ranks: Sequence[Sequence[int]]) -> list[int]:
    """Return the rows of a step, once where ranks have the same ones."""
    return list(chain.from_iterable(dict.fromkeys(map(tuple, ranks))))


def _first_other(together: Steps, one: Steps) -> int | None:
    """Return the first step that has other rows than the reference's, where both have as many.

    None if there is none, or if steps cannot be compared.
    """
    for step, (ours, theirs) in enumerate(zip(together, one, strict=False)):
        if len(ours) != len(theirs):
            return None
        if Counter(ours) != Counter(theirs):
            return step
    return None


def _finding(reason: str, step: int | None, level: Level = Level.FAULT) -> RankFinding:
    return RankFinding(level=level, kind="rows", step=step, reason=reason)


def _of_ranks(own: Sequence[Steps], first: int | None) -> RankFinding | None:
    """Find rows of one rank that another one repeats, before any rank repeats a row of its own.

    In the epochs of a right training, and with replacement, a rank meets its own rows again as
    often as those of another rank. If it only meets those of others, between rows that are new to
    all, ranks have orders or parts of their own.
    """
    ranks = len(own)
    enough = max(ranks, math.ceil(math.log(_CHANCE) / math.log((ranks - 1) / ranks)))
    seen: list[set[int]] = [set() for _ in own]  # of each rank, in this part of the training
    repeats, mixed, begin = 0, 0, None
    for step, rows in enumerate(zip(*own, strict=False)):
        here = list(map(set, rows))
        every, before = set().union(*here), set().union(*seen)
        # Ranks of a model-parallel group have all rows together.
        shared = Counter(chain.from_iterable(dict.fromkeys(map(frozenset, here))))
        again = every & before | {row for row, count in shared.items() if count > 1}
        is_own = any(
            len(a) < len(all_rows) or a & b for a, all_rows, b in zip(here, rows, seen, strict=True)
        )
        if is_own or again == every:
            # A rank meets its own rows again, or an epoch begins anew.
            seen, repeats, mixed, begin = here, 0, 0, None
            continue
        if again:
            repeats, mixed = repeats + len(again), mixed + 1
            begin = step if begin is None else begin
        seen = [mine | new for mine, new in zip(seen, here, strict=True)]
        if repeats >= enough and mixed >= _MIXED_STEPS and begin is not None:
            return _finding(
                "ranks train on rows that another rank has had, between new ones: their parts of "
                "the data overlap",
                begin if first is None else min(first, begin),
            )
    return None


def _of_orders(
    together: Steps, one: Steps, first: int | None, ranks: int, words: str
) -> RankFinding | None:
    """Find rows that repeat where the reference repeats none, after steps with equal rows."""
    if first is None or first < _MIXED_STEPS:
        return None
    for begin, end in _without_repeats(one):
        rows = Counter(chain.from_iterable(together[begin:end]))
        repeats = rows.total() - len(rows)
        if end > first and repeats >= ranks:
            return _finding(
                f"rows are those of {words} before this step; from here on {repeats} rows are "
                "trained on twice, where that training repeats none",
                first,
            )
    return None


def _of_places(own: Sequence[Steps], one: Steps, words: str) -> RankFinding | None:
    """Find ranks that go through the order of the reference from different places.

    Each rank has a part of the rows of one of its steps, always as many steps ahead.
    """
    begin, end = _without_repeats(one)[0]
    place = {row: step for step in range(begin, end) for row in one[step]}
    ahead: list[list[int]] = []
    for steps in own:
        found: list[int] = []
        for number, rows in enumerate(steps):
            [there, *others] = {place.get(row, -1) for row in rows} or {-1}
            if others or there < 0 or len(rows) >= len(one[there]):
                break
            found.append(there - number)
        ahead.append(found)
    shared = min(map(len, ahead))
    if shared < _SAME_PLACES or any(len(set(each[:shared])) > 1 for each in ahead):
        return None
    first = ahead[0][0]
    rank = next((r for r, each in enumerate(ahead) if each[0] != first), None)
    if rank is None:
        return None
    return _finding(
        f"rank {rank} trains on rows of step {ahead[rank][0] + 1} of {words}, rank 0 on those of "
        f"step {first + 1}: they go through the data from different places",
        0,
    )


def _without_repeats(steps: Steps) -> list[tuple[int, int]]:
    """Return the longest ranges of steps, one after the other, in which no row repeats."""
    ranges: list[tuple[int, int]] = []
    begin = 0
    seen: set[int] = set()
    for step, rows in enumerate(steps):
        if seen.intersection(rows):
            ranges.append((begin, step))
            begin, seen = step, set()
        seen.update(rows)
    return [*ranges, (begin, len(steps))]


def _of_counts(together: Steps, one: Steps, first: int | None, words: str) -> RankFinding | None:
    """Compare how often rows were trained on, where both trainings have ended by themselves."""
    ours, theirs = (Counter(chain.from_iterable(steps)) for steps in (together, one))
    # Each epoch may leave out the rows of a step that is not full.
    room = max(map(len, (*together, *one))) * max(theirs.values())
    missing = (theirs - ours).total()
    unknown = sum(count for row, count in ours.items() if row not in theirs)
    if missing <= room:
        return None
    is_less = ours.total() + room < theirs.total()
    what = f"ranks train on {ours.total()} rows, {words} on {theirs.total()}"
    if unknown > room:  # of other data, or changed at random
        return _finding(what, first, Level.SUSPICION) if is_less else None
    if is_less:
        return _finding(f"{what}: {missing} rows are missing", first)
    if len(set(theirs.values())) == 1 and (more := (ours - theirs).total() - unknown) > room:
        return _finding(
            f"{missing} rows are trained on less often than in {words}, {more} more often",
            first,
        )
    return None


def samples_fault(
    samples: Sequence[Sequence[str]], reference: str, trained: Sequence[Sequence[int]] = ()
) -> str | None:
    """Return how the samples of the ranks differ from those of the reference, which come first.

    trained: likewise the rows of the step that backward passes reach; empty: not known. Samples are
    also those that are fetched for an evaluation, or ahead.
    """
    theirs, *ours = (Counter(each) for each in samples)
    fed = [each for each in ours if each]
    if not theirs or not fed or all(each == theirs for each in fed):
        return None  # not known, or every rank has the whole batch
    together = sum(fed, Counter())
    if together == theirs:
        return None
    if len(fed) > 1 and all(each == fed[0] for each in fed[1:]):
        return "every rank trains on the same samples: " + _repeated(ours)
    if together.total() != theirs.total():
        counts = _counts_fault([each.total() for each in fed], theirs.total(), reference)
        return _rows_fault(trained, reference) if trained and all(trained) else counts
    repeated = sum(count - 1 for count in together.values() if count > 1)
    if repeated:
        return f"{repeated} samples of the step are trained on by two ranks"
    return _others_fault((together - theirs).total(), theirs.total(), reference)


def _rows_fault(trained: Sequence[Sequence[int]], reference: str) -> str:
    theirs, *ours = trained
    together = Counter(_of_step(ours))
    others = (together - Counter(theirs)).total()
    if together.total() != len(theirs):
        return _counts_fault([len(each) for each in ours], len(theirs), reference)
    if others:
        return _others_fault(others, len(theirs), reference)
    return f"ranks fetch other batches than {reference} before the step, as for an evaluation"


def _counts_fault(ours: Sequence[int], theirs: int, reference: str) -> str:
    each = f", {ours[0]} each" if len(set(ours)) == 1 else ""
    return (
        f"{len(ours)} ranks train on {sum(ours)} samples in a step{each}, {reference} on {theirs}; "
        "give each rank its share of a fixed global batch"
    )


def _others_fault(others: int, samples: int, reference: str) -> str:
    return (
        f"{others} of {samples} samples are others than those of {reference}: the order or the "
        "random changes of samples depend on the number of ranks; use a DistributedSampler with "
        "one process, too"
    )


def _repeated(ours: Sequence[Counter[str]]) -> str:
    first, second = [rank for rank, each in enumerate(ours) if each][:2]
    return f"rank {second} repeats the samples of rank {first}"
