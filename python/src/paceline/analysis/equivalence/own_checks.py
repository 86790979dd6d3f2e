"""Checks of what ranks recorded by themselves: forms of parallelism, weights, buffers, rows.

Each yields findings; `ranks` puts them into an order and says what they show together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise

import numpy as np

from paceline.analysis.equivalence.exchange import near, numbers
from paceline.analysis.equivalence.sample_log import some
from paceline.measure.records.own_steps import (
    Group,
    OwnStep,
    OwnSteps,
    State,
    TensorPart,
    fed_rows,
)

# Order of causes within a step: what comes first makes the others.
_ORDER = (
    *("start", "buffers", "groups", "moments", "rows", "emptied", "exchange", "skipped", "used"),
    *("terms", "passes", "summed", "shards", "lost", "drift", "statistics", "counts"),
)
# Faults in every form of parallelism.
_OF_REPLICAS = {"drift", "groups", "moments", "emptied", "lost", "shards", "counts"}
_SEVERAL = 2  # steps
_SEED = "seed every process equally (torch.manual_seed), or let rank 0 send its weights"
_AFTER_WRAPPER = "its gradient is not exchanged either, so it may be newer than the wrapper"
_ROUNDING = 1e-6  # relative difference of weights that were computed in another order
_ROUNDING_OF_MANY_STEPS = 1e-3

Steps = Mapping[int, OwnStep]  # of each rank


class Level(StrEnum):
    """The weight of a finding in the statement; the heaviest first."""

    FAULT = "fault"
    SUSPICION = "suspicion"
    NOT_SHOWN = "not shown"
    WEAKER = "weaker"
    REMARK = "remark"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFinding:
    """One thing that the ranks show. step: counted from 0."""

    level: Level
    reason: str  # a sentence without its full stop
    kind: str
    step: int | None = None
    tensor: str | None = None
    factor: float | None = None

    @property
    def sentence(self) -> str:
        """Return the reason with its step, counted from 1."""
        return self.reason if self.step is None else f"step {self.step + 1}: {self.reason}"

    @property
    def place(self) -> int:
        return _ORDER.index(self.kind) if self.kind in _ORDER else len(_ORDER)

    @property
    def is_of_replicas(self) -> bool:
        """Return whether it is a fault in every form of parallelism."""
        return self.kind in _OF_REPLICAS


def layout_of(records: Sequence[OwnSteps]) -> list[str]:
    """Return the forms of parallelism in which gradients are no plain means of ranks."""
    found = list(dict.fromkeys(each for record in records for each in record.layout))
    starts = [{s.place.name: s for s in record.steps[0].weights} for record in records]
    shared = set(starts[0]).intersection(*starts[1:])
    have_own = all(each.keys() - shared for each in starts)
    if all(starts) and (not shared or (have_own and _send_messages(records))):
        found.append("ranks have different layers (pipeline)")
        return found
    if steps_parts(records):
        found.append("optimisers step parts of weights that ranks have divided by hand")
    whole = [n for n in shared if all(s[n].place.parts == 1 for s in starts)]
    if any(starts[0][name].shape != each[name].shape for name in whole for each in starts):
        found.append("ranks have parts of tensors, divided by hand (tensor parallel)")
    elif _shares_rows(records) and any(
        starts[0][name].value.crc32 != each[name].value.crc32 for name in whole for each in starts
    ):
        found.append("ranks have the same rows, and some weights of their own (tensor parallel)")
    elif experts := _experts(records):
        found.append(
            f"ranks have {some(experts)} of their own, to which they send rows (expert parallel)"
        )
    return found


def _experts(records: Sequence[OwnSteps]) -> list[str]:
    """Return weights of each rank that belong to modules which exchange rows in a forward pass.

    Other weights must be equal: without a common seed, all of them differ.
    """
    first = [each.steps[0].weights for each in records]
    unequal = {each.name for each in unequal_places(first)}
    wide = {each.place.name for each in first[0] if len(each.shape) > 1}
    inside = [
        all(any(is_in(name, module) for module in each.exchanging) for name in unequal)
        for each in records
    ]
    return sorted(unequal) if unequal and wide - unequal and all(inside) else []


def is_in(name: str, module: str) -> bool:
    """Return whether a weight belongs to a module; a whole model has its prefix as its name."""
    return name.startswith(f"{module}." if module and not module.endswith(".") else module)


def _send_messages(records: Sequence[OwnSteps]) -> bool:
    """Return whether all ranks send to single other ones, or receive, in all of their steps."""
    return all(step.has_messages for record in records for step in record.steps)


def steps_parts(records: Sequence[OwnSteps]) -> bool:
    """Return whether optimisers step other tensors than the weights that have a gradient.

    Their tensors differ between ranks, and the weights do not: a rank steps a part of a flat copy.
    """
    first = [each.steps[0] for each in records]
    own = {each.place.name for step in first for each in step.own}
    used = {each.place.name for step in first for each in step.used}
    unequal = {each.name for each in unequal_places([step.weights for step in first])}
    return bool(own) and not own & used and bool(unequal) and unequal <= used


def _shares_rows(records: Sequence[OwnSteps]) -> bool:
    """Return whether all ranks call their models with the same rows first."""
    first = [each.steps[0].rows for each in records]
    calls = [rows[0].checksums for rows in first if rows]
    return len(calls) < len(first) or all(each == calls[0] for each in calls)


# --- weights, buffers, groups ---


def equal_states(
    records: Sequence[OwnSteps],
    keys: Sequence[tuple[int, int]],
    by_key: Sequence[Mapping[tuple[int, int], OwnStep]],
    *,
    is_divided: bool,
    is_left_out: bool = False,
    own: Collection[str] = (),
) -> Iterator[RankFinding]:
    """Compare weights before each step, and buffers when modules use them.

    is_divided: ranks may have weights of their own; those that were equal must stay so, but `own`.
    is_left_out: no gradient of weights that differ first is exchanged, while others are.
    """
    first: set[TensorPart] = set()
    for number, key in enumerate(keys):
        steps = [found[key] for found in by_key]
        unequal = list(_unequal([each.weights for each in steps]))
        if not number:
            first = {each.place for each in unequal} if is_divided else set()
            first |= {s.place for step in steps for s in step.weights if s.place.name in own}
        new = [each for each in unequal if each.place not in first]
        if number:
            yield from _of_states(new, "drift", key[1])
        else:
            beside = _AFTER_WRAPPER if is_left_out else _SEED + _if_divided(steps, new)
            yield from _of_states(new, "start", key[1], beside)
        if not is_divided:
            used = [[b for b in each.buffers if b.is_used] for each in steps]
            buffers = [[b for b in each if b.is_of_model] for each in used]
            yield from _of_states(list(_unequal(buffers)), "buffers", key[1])
            others = [[b for b in each if not b.is_of_model] for each in used]
            for found in _of_states(list(_unequal(others)), "buffers", key[1]):
                yield replace(found, level=Level.REMARK, kind="constant-buffers")
    unequal = [e for e in _unequal([each.after for each in records]) if e.place not in first]
    if keys:
        yield from _of_states(unequal, "drift", keys[-1][1] + 1)
        if not is_divided:
            is_wanted = any(each.keeps_statistics for each in records)
            yield from _of_statistics(keys, by_key, Level.SUSPICION if is_wanted else Level.REMARK)
    if not unequal:
        yield from _of_later(records, first)


def _of_statistics(
    keys: Sequence[tuple[int, int]],
    by_key: Sequence[Mapping[tuple[int, int], OwnStep]],
    level: Level,
) -> Iterator[RankFinding]:
    """Name running statistics that differ. A normalisation in training mode does not use them."""
    for key in keys:
        steps = [found[key] for found in by_key]
        unequal = _unequal([[b for b in each.buffers if not b.is_used] for each in steps])
        names = [each.place.name for each in unequal if each.difference > _ROUNDING]
        if names:
            yield RankFinding(
                level=level,
                kind="statistics",
                step=key[1],
                tensor=names[0],
                reason=f"the running statistics {some(names)} of ranks differ: evaluations and "
                "checkpoints depend on the rank",
            )
            return


def _of_later(records: Sequence[OwnSteps], first: set[TensorPart]) -> Iterator[RankFinding]:
    """Find options and weights that differ after later steps. first: weights that always did."""
    for those in zip(*(each.later for each in records), strict=False):
        if len({each.steps for each in those}) > 1:
            return
        options = list(equal_groups([each.groups for each in those], those[0].steps))
        yield from options
        unequal = [e for e in _unequal([each.weights for each in those]) if e.place not in first]
        apart = [each for each in unequal if each.difference > _ROUNDING_OF_MANY_STEPS]
        if apart:
            yield from _of_states(apart, "drift", those[0].steps)
        if options or apart:
            return


def equal_starts(
    records: Sequence[OwnSteps],
    keys: Sequence[tuple[int, int]],
    by_key: Sequence[Mapping[tuple[int, int], OwnStep]],
) -> list[bool]:
    """Return whether all ranks have equal weights before each step, and after the last one."""
    states = [[found[key].weights for found in by_key] for key in keys]
    if all(each.after for each in records):
        states.append([each.after for each in records])
    return [not unequal_places(each) for each in states]


def become_equal(records: Sequence[OwnSteps]) -> bool:
    """Return whether ranks have other weights before a later step, and equal ones before another.

    Both steps follow those that are recorded.
    """
    marks = zip(*(each.marks for each in records), strict=False)
    return any(not a and b for a, b in pairwise(len(set(each)) == 1 for each in marks))


def unequal_places(states: Sequence[Sequence[State]]) -> list[TensorPart]:
    return [each.place for each in _unequal(states)]


@dataclass(frozen=True, slots=True)
class _Unequal:
    place: TensorPart
    ranks: tuple[int, int]
    difference: float


def _unequal(states: Sequence[Sequence[State]]) -> Iterator[_Unequal]:
    """Yield each place where ranks differ; places that one rank alone has are not compared."""
    first: dict[TensorPart, tuple[int, State]] = {}
    seen: set[TensorPart] = set()
    for rank, those in enumerate(states):
        for each in those:
            other, theirs = first.setdefault(each.place, (rank, each))
            if theirs.value.crc32 == each.value.crc32 or each.place in seen:
                continue
            if theirs.shape != each.shape:
                continue
            seen.add(each.place)
            a, b = numbers(theirs.value), numbers(each.value)
            scale = max(float(np.linalg.norm(a)), float(np.linalg.norm(b))) or 1.0
            yield _Unequal(each.place, (other, rank), float(np.linalg.norm(a - b)) / scale)


def _if_divided(steps: Sequence[OwnStep], unequal: Sequence[_Unequal]) -> str:
    """Return what else explains first weights that differ, where ranks have other ones equal.

    Without a common seed all of them would differ that do not begin with a constant, as biases do.
    """
    places = {each.place for each in unequal}
    wide = [each for each in steps[0].weights if len(each.shape) > 1]
    if all(each.place in places for each in wide):
        return ""
    return "; where ranks divide these layers, all of them need the same rows"


def _of_states(
    unequal: Sequence[_Unequal], kind: str, step: int, beside: str = ""
) -> Iterator[RankFinding]:
    for is_rounding in (False, True):
        those = [each for each in unequal if (each.difference <= _ROUNDING) == is_rounding]
        if not those:
            continue
        rank, other = those[0].ranks
        what = f"{some([each.place.name for each in those])} of rank {other}"
        words = {
            "start": f"{what} differs from that of rank {rank} before the first step: {beside}",
            "drift": f"{what} is no longer that of rank {rank}",
            "buffers": f"the buffer {what} differs from that of rank {rank} when it is used",
        }
        yield RankFinding(
            level=Level.REMARK if is_rounding else Level.FAULT,
            kind=kind,
            step=step,
            tensor=those[0].place.name,
            reason=words[kind] + (", by rounding" if is_rounding else ""),
        )


def equal_groups(of_ranks: Iterable[Sequence[Group]], step: int) -> Iterator[RankFinding]:
    """Compare the options of optimisers, parameter by parameter. of_ranks: groups of each rank."""
    known: dict[tuple[str, str], tuple[int, float | str]] = {}
    for rank, groups in enumerate(of_ranks):
        for group in groups:
            for name in group.names:
                for option, value in group.options.items():
                    other, theirs = known.setdefault((name, option), (rank, value))
                    if theirs != value:
                        words = "the learning rate" if option == "lr" else option
                        yield RankFinding(
                            level=Level.FAULT,
                            kind="groups",
                            step=step,
                            tensor=name,
                            factor=_ratio(value, theirs),
                            reason=f"{words} of rank {rank} is {_text(value)}, of rank {other} "
                            f"{_text(theirs)}",
                        )
                        return


def _ratio(value: float | str, other: float | str) -> float | None:
    if isinstance(value, float) and isinstance(other, float) and other:
        return value / other
    return None


def _text(value: float | str) -> str:
    return f"{value:g}" if isinstance(value, float) else value


def equal_moments(steps: Steps) -> Iterator[RankFinding]:
    """Compare what optimisers have of a parameter before their first step, as after a restart."""
    stepped = {r: {n for g in s.groups for n in g.names} for r, s in steps.items()}
    states = {r: {each.place: each for each in s.moments} for r, s in steps.items()}
    for place in dict.fromkeys(place for each in states.values() for place in each):
        name = place.name.partition(" of ")[2]
        known = {r: states[r].get(place) for r, names in stepped.items() if name in names}
        if not known:
            continue
        (rank, one), *others = known.items()
        for other, theirs in others:
            if _are_equal(one, theirs):
                continue
            has = other if theirs is not None and theirs.value.l2 else rank
            lacks = rank if has == other else other
            only = one is None or theirs is None
            yield RankFinding(
                level=Level.FAULT,
                kind="moments",
                step=_number(steps),
                tensor=name,
                reason=f"the optimiser of rank {has} begins with {place.name}, that of rank "
                f"{lacks} {'without it' if only else 'with another one'}",
            )
            return


def _are_equal(one: State | None, other: State | None) -> bool:
    """Return whether two states of optimisers are equal except for rounding; none is zero."""
    if one is None or other is None:
        return all(each is None or not each.value.l2 for each in (one, other))
    if one.shape != other.shape or one.value.crc32 == other.value.crc32:
        return True
    a, b = numbers(one.value), numbers(other.value)
    scale = max(float(np.linalg.norm(a)), float(np.linalg.norm(b))) or 1.0
    return float(np.linalg.norm(a - b)) <= _ROUNDING * scale


def emptied(steps: Steps) -> Iterator[RankFinding]:
    """Find ranks that add to the gradients of the step before, where others begin with none."""
    kept, fresh = dict[int, set[str]](), dict[int, set[str]]()
    for rank, step in steps.items():
        first = {each.place.name: each.current[0] for each in step.own if each.current}
        kept[rank] = {n for n, each in first.items() if not each.fresh and each.first.l2}
        fresh[rank] = {n for n, each in first.items() if each.fresh and each.first.l2}
    for rank, names in kept.items():
        for other, empty in fresh.items():
            shared = sorted(names & empty)
            is_all = not fresh[rank] and not kept[other]
            if names and empty and (shared or is_all):
                those = shared or sorted(names)
                yield RankFinding(
                    level=Level.FAULT,
                    kind="emptied",
                    step=_number(steps),
                    tensor=those[0],
                    reason=f"rank {rank} adds to the gradient of {some(those)} of the step before, "
                    f"rank {other} begins with an empty one",
                )
                return


def lost_updates(
    records: Sequence[OwnSteps],
    keys: Sequence[tuple[int, int]],
    by_key: Sequence[Mapping[tuple[int, int], OwnStep]],
) -> Iterator[RankFinding]:
    """Find weights that optimisers move, and that are as before when the next step begins."""
    later = [key for key in keys if key[1]]
    if not later:
        return
    used = {u.place.name for r in by_key for key in later for u in r[key].used if u.value.l2}
    lost = [set(r[key].lost) for key in later for r in by_key if r[key].lost]
    always = set.union(*lost) if lost else set()
    for step in (record[key] for record in by_key for key in later):
        always -= {each.place.name for each in step.used}.difference(step.lost)
    if not always:
        return
    is_all = used <= always and all(len(set(each.marks)) <= 1 for each in records)
    if not is_all and len(later) < _SEVERAL:
        return
    what = "all weights" if is_all else some(sorted(always))
    yield RankFinding(
        level=Level.FAULT if is_all else Level.SUSPICION,
        kind="lost",
        step=later[0][1] - 1,
        tensor=min(always),
        reason=f"the optimiser moves {what}, but before the next step the old values are back",
    )


# --- gradients that are used ---


def equal_used(steps: Steps, exchanged: set[TensorPart]) -> Iterator[RankFinding]:
    """Compare the gradients that optimisers use, of the places where they are the mean."""
    first: dict[TensorPart, tuple[int, int]] = {}
    ratios: dict[int, list[float]] = {}
    names: set[str] = set()
    for rank, step in steps.items():
        for each in (each for each in step.used if each.place in exchanged):
            crc32 = (each.after or each.value).crc32
            other, theirs = first.setdefault(each.place, (rank, crc32))
            if each.before_clip is not None:
                a, b = numbers(each.value), numbers(each.before_clip)
                ratio = float(a @ b) / (float(b @ b) or 1.0)
                # Otherwise it was exchanged after it was clipped.
                if ratio and np.linalg.norm(a - ratio * b) <= _ROUNDING * np.linalg.norm(a):
                    ratios.setdefault(rank, []).append(ratio)
            if theirs != crc32 and other != rank:
                names.add(each.place.name)
    yield from of_scales({r: float(np.median(each)) for r, each in ratios.items()}, _number(steps))
    if names:
        yield RankFinding(
            level=Level.REMARK,
            kind="used",
            step=_number(steps),
            tensor=min(names),
            reason=f"the gradient of {some(sorted(names))} differs between ranks in its last bits",
        )


def of_scales(scales: Mapping[int, float], step: int) -> Iterator[RankFinding]:
    """Compare the factors by which ranks multiply the mean, or their parts of it."""
    values = list(scales.values())
    if values and any(not near(each, values[0]) for each in values):
        words = ", ".join(f"{each:.3g} on rank {rank}" for rank, each in scales.items())
        yield RankFinding(
            level=Level.FAULT,
            kind="used",
            step=step,
            factor=max(values) / min(values) if min(values) > 0 else None,
            reason=f"ranks multiply the mean gradient differently, as by a norm of their own: "
            f"{words}",
        )


def _number(steps: Steps) -> int:
    return next(iter(steps.values())).step


# --- rows ---


def own_rows(steps: Steps) -> Iterator[RankFinding]:
    """Find rows that several ranks have."""
    step = _number(steps)
    counters = [Counter(c for each in s.rows for c in each.checksums) for s in steps.values()]
    if not all(counters):
        yield RankFinding(
            level=Level.WEAKER,
            kind="no-rows",
            step=step,
            reason="the rows of the step are not known",
        )
        return
    if len(set().union(*counters)) == 1 and sum(each.total() for each in counters) > len(counters):
        yield RankFinding(
            level=Level.WEAKER, kind="no-rows", step=step, reason="rows cannot be told apart"
        )
        return
    if all(each == counters[0] for each in counters):
        yield RankFinding(
            level=Level.FAULT, kind="rows", step=step, reason="all ranks train on the same rows"
        )
        return
    fed = [Counter(c for each in fed_rows(s.rows) for c in each.checksums) for s in steps.values()]
    shared = sum((a & b).total() for n, a in enumerate(fed) for b in fed[n + 1 :])
    if shared:
        yield RankFinding(
            level=Level.WEAKER,
            kind="shared-rows",
            step=step,
            reason=f"{'1 row of the step is' if shared == 1 else f'{shared} rows of the step are'} "
            "on two ranks",
        )
