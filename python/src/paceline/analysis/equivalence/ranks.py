"""Judge the ranks of a script against each other: is it a right data-parallel training?

A data-parallel step is the gradient of one mean loss over all ranks' rows. So ranks start each step
with equal weights, have rows of their own, and each row has the same weight in the gradient. Every
finding comes from the ranks' records alone; `Statement` says what they show together.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import count, pairwise

import numpy as np

from paceline.analysis.equivalence.exchange import (
    FEW,
    Exchanged,
    common_factor,
    exchanged,
    factor_of_shards,
)
from paceline.analysis.equivalence.not_means import is_local, not_means
from paceline.analysis.equivalence.options import OptionsComparison
from paceline.analysis.equivalence.own_checks import (
    Level,
    RankFinding,
    become_equal,
    emptied,
    equal_groups,
    equal_moments,
    equal_starts,
    equal_states,
    equal_used,
    is_in,
    layout_of,
    lost_updates,
    of_scales,
    own_rows,
    steps_parts,
    unequal_places,
)
from paceline.analysis.equivalence.row_weights import MADE_UP, row_weights
from paceline.analysis.equivalence.sample_log import some
from paceline.measure.records.own_steps import (
    OwnStep,
    OwnSteps,
    State,
    TensorPart,
    fed_rows,
)

_LEVELS = tuple(Level)
_StepKey = tuple[int, int]  # optimizer and step


class Statement(IntEnum):
    """A statement about a script; the first one needs a training in one process."""

    EQUAL = 1
    DATA_PARALLEL = 2
    MEAN = 3
    NOT_SHOWN = 4
    WRONG = 5

    @property
    def words(self) -> str:
        return _WORDS[self]


_WORDS = {
    Statement.EQUAL: "equal to one process on the same samples",
    Statement.DATA_PARALLEL: "a right data-parallel step",
    Statement.MEAN: "ranks agree, and use the mean of their own gradients",
    Statement.NOT_SHOWN: "not shown",
    Statement.WRONG: "wrong",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksFinding:
    """The statement that the ranks of a layout allow."""

    statement: Statement
    findings: tuple[RankFinding, ...]  # the cause first
    steps: int  # that were compared, from the first one on
    last: int = 0  # that were compared after some that were not
    rows: tuple[int, ...] = ()  # of each rank, in the first step

    @property
    def is_suspicious(self) -> bool:
        return any(each.level == Level.SUSPICION for each in self.findings)

    def beside(self, finding: RankFinding) -> RanksFinding:
        """Return this with one more finding, which comes first if it is a fault."""
        is_cause = finding.level == Level.FAULT
        found = (finding, *self.findings) if is_cause else (*self.findings, finding)
        return replace(self, findings=found, statement=statement_of(found))


_ALONE = "one rank has no other one to agree with, and can only be compared with one process"
_EQUAL_OPTIONS = OptionsComparison()
ONE_RANK = RanksFinding(
    statement=Statement.NOT_SHOWN,
    findings=(RankFinding(level=Level.NOT_SHOWN, kind="one-rank", reason=_ALONE),),
    steps=0,
)


def judge_ranks(
    records: Sequence[OwnSteps],
    steps: int,
    of_rows: Sequence[RankFinding] = (),
    options: OptionsComparison = _EQUAL_OPTIONS,
) -> RanksFinding:
    """Judge what ranks recorded by themselves, in their order.

    steps: that were to be recorded. of_rows: what the rows of the whole training show. options: of
    optimisers, compared with the reference.
    """
    if len(records) < 2 or not all(each.steps for each in records):
        reason = "no step of an optimiser was recorded on every rank"
        found = RankFinding(level=Level.NOT_SHOWN, kind="no-step", reason=reason)
        return RanksFinding(statement=Statement.NOT_SHOWN, findings=(found,), steps=0)
    return _Judgement(records, steps, of_rows, options).result()


def statement_of(findings: Iterable[RankFinding]) -> Statement:
    """Return the highest statement that the findings of ranks leave."""
    levels = {each.level for each in findings}
    if Level.FAULT in levels:
        return Statement.WRONG
    if Level.NOT_SHOWN in levels:
        return Statement.NOT_SHOWN
    return Statement.MEAN if levels & {Level.WEAKER, Level.SUSPICION} else Statement.DATA_PARALLEL


class _Judgement:
    def __init__(
        self,
        records: Sequence[OwnSteps],
        steps: int,
        of_rows: Sequence[RankFinding],
        options: OptionsComparison,
    ) -> None:
        self._records, self._most, self._of_rows = records, steps, of_rows
        self._options = options
        self._ranks = len(records)
        self._by_key = [{(e.optimizer, e.step): e for e in each.steps} for each in records]
        shared = set(self._by_key[0]).intersection(*self._by_key[1:])
        self._keys = [key for key in self._by_key[0] if key in shared]  # as they took place
        self._exchanged: dict[_StepKey, list[Exchanged]] = {}
        self._parts = self._divided_parts()
        self._layout = layout_of(records) or self._by_hand()
        if self._parts:
            self._layout.append(
                f"ranks have {some(self._parts)} of their own in a module that gathers the rows of "
                "all ranks and sums its results over them (model parallel)"
            )
        self._equal = equal_starts(records, self._keys, self._by_key)
        in_these = any(not a and b for a, b in pairwise(self._equal))
        self._becomes_equal = in_these or become_equal(records)

    def result(self) -> RanksFinding:
        if self._take_turns():
            reason = "ranks step in turns, and send the weights to the others"
            found = [RankFinding(level=Level.NOT_SHOWN, kind="turns", reason=reason)]
            return RanksFinding(statement=statement_of(found), findings=tuple(found), steps=0)
        found = list(self._findings())
        if self._layout:  # gradients that are no plain means of ranks are right there
            found = [
                each
                for each in found
                if (each.level == Level.REMARK and each.kind != "total") or each.is_of_replicas
            ]
            found = [self._of_divided(each) for each in found]
            found += [
                RankFinding(level=Level.NOT_SHOWN, kind=reason, reason=reason)
                for reason in self._layout
            ]
        found.sort(key=lambda each: (_LEVELS.index(each.level), each.step or 0, each.place))
        compared = {step for _, step in self._keys}
        first = next(step for step in count() if step not in compared)
        return RanksFinding(
            statement=statement_of(found),
            findings=tuple(_once(found)),
            steps=first,
            last=len(compared) - first,
            rows=tuple(
                sum(len(r.checksums) for r in fed_rows(each.steps[0].rows))
                for each in self._records
            ),
        )

    def _take_turns(self) -> bool:
        """Return whether no two ranks step after the same backward pass, in any step.

        Something else moves the weights between the steps of each.
        """
        passes = [
            {each.number for key in self._keys for each in found[key].passes[-1:]}
            for found in self._by_key
        ]
        later = [found[key] for found in self._by_key for key in self._keys if key[1]]
        is_apart = len(set().union(*passes)) == sum(map(len, passes))
        return is_apart and bool(later) and not any(each.keeps_weights for each in later)

    def _of_divided(self, finding: RankFinding) -> RankFinding:
        """Say why weights that ranks should have alike drift, if layers are divided among them."""
        rows = [
            {row for call in each.steps[0].rows for row in call.checksums} for each in self._records
        ]
        have_own = all(rows) and len(set().union(*rows)) == sum(map(len, rows))
        is_tensor_parallel = any("tensor parallel" in reason for reason in self._layout)
        is_fault = finding.kind == "drift" and finding.level == Level.FAULT
        if not (is_fault and have_own and is_tensor_parallel):
            return finding
        reason = f"{finding.reason}: ranks that divide layers need the same rows, and have others"
        return replace(finding, reason=reason)

    def _findings(self) -> Iterator[RankFinding]:
        yield from self._counts()
        of_steps = list(self._of_steps())
        if not any(each.kind == "averaged" for each in of_steps):
            divided = bool(self._layout)
            yield from equal_states(
                self._records,
                self._keys,
                self._by_key,
                is_divided=divided,
                is_left_out=self._is_left_out(),
                own=self._parts,
            )
        yield from of_steps
        yield from lost_updates(self._records, self._keys, self._by_key)
        if steps_parts(self._records):
            yield from self._of_shards()
        kinds = {each.kind for each in of_steps}
        if not kinds & {"averaged", "groups", MADE_UP}:
            yield from self._options.findings
        if "rows" not in kinds:
            yield from self._of_rows
        if mixing := self._records[0].mixing:
            reason = f"{some(mixing)} normalises by the rows of each rank"
            yield RankFinding(level=Level.REMARK, kind="batch-norm", reason=reason)
        used = {each.place.name for r in self._records for s in r.steps for each in s.used}
        own = {each.place.name for r in self._records for s in r.steps for each in s.own}
        if own and not used and self._stands_still():
            reason = (
                "no optimiser steps a weight that has a gradient, so no weight changes: the model "
                "was replaced or sharded after the optimiser was made"
            )
            yield RankFinding(level=Level.FAULT, kind="unstepped", step=0, reason=reason)
        elif frozen := sorted(own - used):
            reason = f"{some(frozen)} has a gradient, but no optimiser steps it"
            yield RankFinding(
                level=Level.REMARK, kind="no-optimiser", tensor=frozen[0], reason=reason
            )

    def _stands_still(self) -> bool:
        """Return whether no rank's weights have changed in the steps that were recorded."""
        states = [
            [*(each.weights for each in record.steps), *([record.after] if record.after else [])]
            for record in self._records
        ]
        return all(
            len(those) > 1 and all(_checksums(each) == _checksums(those[0]) for each in those)
            for those in states
        )

    def _of_steps(self) -> Iterator[RankFinding]:
        for key in self._keys:
            steps = self._steps_of(key)
            yield from equal_groups([each.groups for each in steps.values()], key[1])
            if key[1]:
                yield from emptied(steps)
            else:
                yield from equal_moments(steps)
            yield from _of_scaled_clip(steps)
            rows = list(own_rows(steps))
            yield from rows
            yield from self._of_exchange(steps, has_rows=not rows)

    def _steps_of(self, key: _StepKey) -> dict[int, OwnStep]:
        """Return a step of each rank."""
        return {rank: found[key] for rank, found in enumerate(self._by_key)}

    def _exchange_of(self, key: _StepKey) -> list[Exchanged]:
        """Return what became of each tensor in a step; kept, since several questions need it."""
        if key not in self._exchanged:
            self._exchanged[key] = exchanged(self._steps_of(key), self._ranks)
        return self._exchanged[key]

    def _unequal_first(self) -> set[str]:
        """Return the weights that ranks do not have alike before the first step."""
        states = [step.weights for step in self._steps_of(self._keys[0]).values()]
        return {each.name for each in unequal_places(states)}

    def _divided_parts(self) -> list[str]:
        """Return weights of which each rank has a part that may begin with the numbers of others.

        Nothing exchanges their gradients, while others are exchanged, and their module computes the
        results of all ranks' rows together with other ranks.
        """
        if not self._keys or not all(each.dividing for each in self._records):
            return []
        found = [each for each in self._exchange_of(self._keys[0]) if not each.is_zero]
        own = sorted({e.place.name for e in found if e.factor is None and is_local(e)})
        is_inside = all(
            any(is_in(name, module) for module in record.dividing)
            for record in self._records
            for name in own
        )
        return own if len(own) < len(found) and is_inside else []

    def _by_hand(self) -> list[str]:
        """Return how ranks divide layers if own gradients show it.

        Weights differ, and those that do not have the same gradient on all ranks by itself.
        """
        if not self._keys:
            return []
        unequal = self._unequal_first()
        same = [e for e in self._exchange_of(self._keys[0]) if e.place.name not in unequal]
        if unequal and same and not any(each.is_distinct for each in same):
            what = "ranks have some weights of their own, and without an exchange equal gradients"
            return [f"{what} of the others (tensor parallel)"]
        return []

    def _of_shards(self) -> Iterator[RankFinding]:
        """Compare the sum of all elements of the shards that optimisers step with the mean's."""
        every = [[found[key] for found in self._by_key] for key in self._keys]
        factor = factor_of_shards(every, self._ranks)
        if factor is None:
            return
        for each in row_weights(dict(enumerate(every[0])), factor, self._ranks):
            if each.level == Level.FAULT:
                yield replace(each, kind="shards")

    def _is_left_out(self) -> bool:
        """Return whether no gradient of weights that differ first is exchanged, and others are."""
        if not self._keys:
            return False
        unequal = self._unequal_first()
        found = [each for each in self._exchange_of(self._keys[0]) if not each.is_zero]
        own = {each.place.name for each in found if each.factor is None and is_local(each)}
        right = [each for each in found if each.factor is not None and each.is_distinct]
        return bool(right) and bool(unequal) and unequal <= own

    def _of_step_before(
        self, steps: Mapping[int, OwnStep], wrong: Sequence[Exchanged]
    ) -> list[RankFinding]:
        """Find gradients that are the mean of the own ones of the step before."""
        key = (steps[0].optimizer, steps[0].step - 1)
        if not wrong or key not in self._keys:
            return []
        former = {r: replace(s, own=self._by_key[r][key].own) for r, s in steps.items()}
        places = {each.place for each in wrong}
        found = [each for each in exchanged(former, self._ranks) if each.place in places]
        found = [each for each in found if each.factor is None or each.numbers >= FEW]
        if not found or any(each.factor is None or each.is_zero for each in found):
            return []
        what = some(sorted({each.place.name for each in wrong}))
        reason = f"the gradient of {what} is that of the step before: its exchange ends too late"
        return [RankFinding(level=Level.FAULT, kind="exchange", step=steps[0].step, reason=reason)]

    def _exchanged_inside(
        self, steps: Mapping[int, OwnStep], wrong: Sequence[Exchanged]
    ) -> list[Exchanged]:
        """Return tensors whose weights stay equal although each rank steps with its own gradient.

        Optimisers that divide their state among ranks exchange gradients in their step.
        """
        unequal = self._unequal_after(steps)
        return [
            each
            for each in wrong
            if unequal is not None
            and each.is_distinct
            and is_local(each)
            and each.place.name not in unequal
        ]

    def _unequal_after(self, steps: Mapping[int, OwnStep]) -> set[str] | None:
        """Return the weights that ranks do not have alike after a step; None if not recorded."""
        after = self._keys.index((steps[0].optimizer, steps[0].step)) + 1
        if after < len(self._keys):
            states = [found[self._keys[after]].weights for found in self._by_key]
        elif all(each.after for each in self._records):
            states = [each.after for each in self._records]
        else:
            return None
        return {each.name for each in unequal_places(states)}

    def _changed_alone(
        self, steps: Mapping[int, OwnStep], wrong: Sequence[Exchanged]
    ) -> list[RankFinding]:
        """Find gradients that are no sums of own ones, and from which weights drift apart."""
        drifting = self._unequal_after(steps) or set()
        names = sorted(
            {
                each.place.name
                for each in wrong
                if each.is_finite and None in each.weights.values() and each.place.name in drifting
            }
        )
        if not names or len({each.place.name for each in wrong}) > len(names):
            return []
        reason = (
            f"each rank changes the gradient of {some(names)} by itself: it is no sum of the "
            "ranks' own ones, and weights drift apart"
        )
        return [RankFinding(level=Level.FAULT, kind="exchange", step=steps[0].step, reason=reason)]

    def _averaged(self, steps: Mapping[int, OwnStep]) -> RankFinding | None:
        """Return what ranks that exchange no gradients do if they average weights; else None."""
        step, key = steps[0].step, (steps[0].optimizer, steps[0].step)
        after = self._keys.index(key) + 1
        every = after < len(self._equal) and all(self._equal)
        if not every and not self._becomes_equal:
            return None
        sender = self._sender(steps[0].optimizer) if every else None
        if sender is not None:
            reason = (
                f"ranks step by themselves, and begin the next step with the weights of rank "
                f"{sender}: what the others have learnt is lost"
            )
            return RankFinding(level=Level.FAULT, kind="exchange", step=step, reason=reason)
        kind = self._records[0].optimizers[steps[0].optimizer]
        if every and all(self._keeping(steps[0].optimizer)):
            reason = f"{kind} exchanges inside of its step what ranks compute of own gradients"
            return RankFinding(level=Level.NOT_SHOWN, kind="averaged", step=step, reason=reason)
        when = "after each step" if every else "after some steps"
        reason = f"ranks step by themselves, and average their weights {when}"
        if every and kind != "SGD":
            reason += f", which is no step of {kind} with the mean gradient"
            return RankFinding(level=Level.FAULT, kind="exchange", step=step, reason=reason)
        return RankFinding(level=Level.NOT_SHOWN, kind="averaged", step=step, reason=reason)

    def _sender(self, optimizer: int) -> int | None:
        """Return the only rank whose weights nothing changes between steps; None without one."""
        keeps = self._keeping(optimizer)
        return keeps.index(True) if keeps.count(True) == 1 else None

    def _keeping(self, optimizer: int) -> list[bool]:
        """Return for each rank whether nothing changes its weights between steps."""
        later = [key for key in self._keys if key[0] == optimizer and key[1]]
        return [
            bool(later) and all(found[k].keeps_weights for k in later) for found in self._by_key
        ]

    def _counts(self) -> Iterator[RankFinding]:
        """Compare how many steps ranks take, as far as they were recorded."""
        counts = [sum(min(n, self._most) for n in each.counts) for each in self._records]
        for rank, each in enumerate(counts):
            if each != counts[0]:
                yield RankFinding(
                    level=Level.FAULT,
                    kind="counts",
                    step=min(each, counts[0]),
                    reason=f"rank {rank} takes {each} steps, rank 0 takes {counts[0]}",
                )
                return

    def _of_exchange(
        self, steps: Mapping[int, OwnStep], *, has_rows: bool
    ) -> Iterator[RankFinding]:
        step = steps[0].step
        found = self._exchange_of((steps[0].optimizer, step))
        right = [each for each in found if each.factor is not None and not each.is_zero]
        wrong = [each for each in found if each.factor is None]
        inside = self._exchanged_inside(steps, wrong) if right else []
        if inside:
            wrong = [each for each in wrong if each not in inside]
            what = some(sorted({each.place.name for each in inside}))
            reason = (
                f"the gradient of {what} is each rank's own before the step, and weights stay "
                "equal: the optimiser exchanges it itself, or one rank sends what it has made"
            )
            yield RankFinding(level=Level.NOT_SHOWN, kind="inside", step=step, reason=reason)
        if not found:
            reason = "no gradient of a rank by itself was seen"
            is_zero = not any(u.value.l2 for each in steps.values() for u in each.used)
            kind = "zero" if is_zero else "no-own"
            yield RankFinding(level=Level.NOT_SHOWN, kind=kind, step=step, reason=reason)
        elif not right and not wrong:
            reason = "all gradients are zero, so nothing was compared"
            yield RankFinding(level=Level.NOT_SHOWN, kind="zero", step=step, reason=reason)
        elif (
            not right
            and all(map(is_local, wrong))
            and (averaged := self._averaged(steps)) is not None
        ):
            yield averaged
        else:
            faults = _skipped(steps) if wrong else []
            faults = faults or self._of_step_before(steps, wrong)
            faults = faults or self._changed_alone(steps, wrong)
            faults = faults or not_means(wrong, steps, self._ranks)
            yield from faults
            if not faults:
                yield from equal_used(steps, {each.place for each in right})
                yield from _of_parts(right, steps)
            yield from _remarks(right, step, has_rows=has_rows)
        factor = common_factor(right)
        if factor is not None and len(right) >= len(wrong):
            scale = self._options.scales.get((steps[0].optimizer, step))
            yield from row_weights(steps, factor, self._ranks, scale)


def _of_parts(right: Sequence[Exchanged], steps: Mapping[int, OwnStep]) -> Iterator[RankFinding]:
    """Compare the factors of the parts of tensors that ranks have."""
    by_part: dict[int, list[float]] = {}
    if any(each.rounded for each in right):
        return
    for each in right:
        if each.place.parts > 1 and each.factor is not None and each.numbers > 1:
            by_part.setdefault(each.place.part, []).append(each.factor)
    scales = {part: float(np.median(factors)) for part, factors in by_part.items()}
    yield from of_scales(scales, next(iter(steps.values())).step)


def _remarks(right: Sequence[Exchanged], step: int, *, has_rows: bool) -> Iterator[RankFinding]:
    rounded = max(right, key=lambda each: each.rounded, default=None)
    if rounded is not None and rounded.rounded:
        name = rounded.place.name
        yield RankFinding(
            level=Level.WEAKER,
            kind="rounded",
            step=step,
            tensor=name,
            reason=f"the mean of the gradients is rounded, by {rounded.rounded:.0e} in {name}",
        )
    if right and has_rows and not any(each.is_distinct for each in right):
        yield RankFinding(
            level=Level.WEAKER,
            kind="equal-gradients",
            step=step,
            reason="all ranks have the same gradient before the exchange, which shows nothing",
        )


def _of_scaled_clip(steps: Mapping[int, OwnStep]) -> Iterator[RankFinding]:
    scale = max(each.clipped_scale for each in steps.values())
    if scale != 1:
        yield RankFinding(
            level=Level.REMARK,
            kind="clipped-scaled",
            step=steps[0].step,
            factor=scale,
            reason=f"gradients are clipped while they are scaled by {scale:g}, so the limit is as "
            "many times smaller; call unscale_ of the scaler before",
        )


def _skipped(steps: Mapping[int, OwnStep]) -> list[RankFinding]:
    """Find a rank that has left out a step, so that its gradient is that of a later pass."""
    passes = {rank: max((p.number for p in s.passes), default=0) for rank, s in steps.items()}
    for rank, number in passes.items():
        if number != passes[0]:
            reason = (
                f"ranks step after different numbers of backward passes: {passes[0]} on rank 0, "
                f"{number} on rank {rank}"
            )
            return [
                RankFinding(level=Level.FAULT, kind="skipped", step=steps[0].step, reason=reason)
            ]
    return []


def _checksums(states: Sequence[State]) -> dict[TensorPart, int]:
    return {each.place: each.value.crc32 for each in states}


def _once(found: Sequence[RankFinding]) -> Iterator[RankFinding]:
    """Yield the first finding of each kind."""
    seen: set[tuple[Level, str]] = set()
    for each in found:
        if (each.level, each.kind) not in seen:
            seen.add((each.level, each.kind))
            yield each
