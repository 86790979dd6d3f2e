"""Judge what ranks observed of a script under `paceline verify`: first difference, and its cause.

A layout is compared with the reference, one process or several ranks, update by update: samples,
outputs of modules, gradients, weights. A tensor may differ by the limits of `tolerances`, and by
four times the change that roundings cause in the reference, where that was measured by training it
once more.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise

import numpy as np

from paceline.analysis.equivalence.module_calls import (
    SAME_FACTOR,
    Kind,
    ModuleComparison,
    ModuleDifference,
    is_near,
)
from paceline.analysis.equivalence.options import compared_options
from paceline.analysis.equivalence.sample_log import some
from paceline.analysis.equivalence.tolerances import LEAST_MISTAKE, ROOM, tolerance
from paceline.analysis.equivalence.trained_rows import (
    rows_of_steps,
    samples_fault,
    shifted_rows,
    words_of,
)
from paceline.measure.records.own_steps import (
    ComparedTensor,
    Observed,
    PartOfTensor,
    TrainedRows,
    Update,
)
from paceline.measure.records.phases import MOST_DIFFERENCE, NOISE_SHARE, ROUNDING_ONLY

_SAME_SCALE = 1e-4  # relative difference of two numbers by which ranks multiply a gradient
_EQUAL_START = 1e-6
# Differences that follow from weights that differ.
_OF_TENSORS = {"gradient", "update", "module", "random", "statistics", "loss"}
_LOST_SHARE = 0.25  # of a step's change: what rounding of weights never reaches


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutFinding:
    """The result for one layout. passed: None if it could not be compared."""

    passed: bool | None
    reason: str  # a sentence without its full stop
    kind: Kind = "none"  # of the difference
    step: int | None = None
    module: str | None = None
    tensor: str | None = None
    factor: float | None = None  # of the whole gradient over that of the reference
    largest: float = 0.0  # largest difference of a tensor, as a share of what is allowed
    steps: int = 0  # that were compared
    limit: str = ""  # why later steps were not compared, as a sentence; empty: they were
    reference: str = "one process"
    is_within: bool = False  # it arises between modules, whose outputs and last gradients agree
    draws: bool = True  # steps draw random numbers of torch, as dropout does


def judge(
    reference: Sequence[Observed],
    rounded: Sequence[Observed],
    ours: Sequence[Observed],
    trained: tuple[Sequence[TrainedRows], Sequence[TrainedRows]] = ((), ()),
) -> LayoutFinding:
    """Judge a layout by what its ranks observed.

    reference, rounded: of one process each, or of all ranks of the reference. Without the second
    one the limits are smaller, so that a layout which passes would pass with it, too.
    trained: the rows of the reference and of the layout; empty: not known.
    """
    words = words_of(len(reference))
    if not (reference and ours and reference[0].updates):
        reason = "no step of an optimiser was observed"
        found = LayoutFinding(passed=None, reason=reason)
    else:
        found = _Judgement(reference, rounded, ours, trained).finding()
    return replace(found, reference=words, draws=bool(reference) and _draws(reference[0].updates))


def _together(ranks: Sequence[Observed]) -> Observed:
    """Return what a training observed: tensors of its first rank, samples and calls of all."""
    first, *others = ranks
    updates = [_by_key(each.updates) for each in others]
    return replace(
        first,
        updates=[
            replace(each, samples=_all_samples([each, *(u[_key(each)] for u in updates)]))
            for each in first.updates
            if all(_key(each) in found for found in updates)
        ],
        calls=[call for each in ranks for call in each.calls],
    )


def _all_samples(updates: Sequence[Update]) -> list[str] | None:
    """Return the samples of all ranks, once where they have the same ones."""
    known = dict.fromkeys(tuple(each.samples) for each in updates if each.samples is not None)
    return [sample for each in known for sample in each] if known else None


@dataclass(frozen=True, slots=True)
class _Start:
    name: str
    rank: int


class _Judgement:
    def __init__(
        self,
        reference: Sequence[Observed],
        rounded: Sequence[Observed],
        ours: Sequence[Observed],
        trained: tuple[Sequence[TrainedRows], Sequence[TrainedRows]],
    ) -> None:
        is_one = not any(update.optimizer for update in reference[0].updates)
        self._rows = rows_of_steps(*trained) if all(trained) and is_one else []
        self._words, self._reference_ranks = words_of(len(reference)), len(reference)
        self._reference, self._ours = _together(reference), ours
        changed = _together(rounded) if rounded else Observed()
        self._rounded_updates = _by_key(changed.updates)
        self._modules = ModuleComparison(
            self._reference, changed.calls, [each.calls for each in ours]
        )
        self._theirs_by_key = _by_key(self._reference.updates)
        self._scales = compared_options(reference, ours, trained).scales
        self._largest = 0.0

    def finding(self) -> LayoutFinding:
        start = self._start()
        if start is not None:
            return start
        updates = [_by_key(each.updates) for each in self._ours]
        compared = 0
        noisy: tuple[int, str] | None = None
        for theirs in self._reference.updates:
            own = [found[_key(theirs)] for found in updates if _key(theirs) in found]
            if len(own) < len(self._ours):
                break
            found = self._of_update(theirs, own)
            if found is not None and noisy is not None and found.kind in _OF_TENSORS:
                return self._limited(*noisy)
            if found is not None:
                return found
            compared = theirs.step + 1
            noisy = noisy or self._noisy(theirs, own)
        if not compared:
            return LayoutFinding(passed=None, reason="no step was taken by all ranks")
        return LayoutFinding(
            passed=True,
            reason=f"{compared} steps agree",
            largest=self._largest,
            steps=compared,
        )

    def _noisy(self, theirs: Update, own: Sequence[Update]) -> tuple[int, str] | None:
        """Return the step and a tensor of which elements with a gradient of roundings have moved.

        Later steps differ by it. None if the reference with other roundings shows by how much.
        """
        rounded = self._rounded_updates.get(_key(theirs))
        if rounded is None:
            return None
        measured = {each.name for each in rounded.change if each.noise_l2}
        for each in _tensors(own, "change"):
            if each.noise_l2 > self._base(theirs) * each.l2 and each.name not in measured:
                return theirs.step, each.name
        return None

    def _limited(self, step: int, name: str) -> LayoutFinding:
        reason = (
            f"only the steps to step {step + 1} were compared with {self._words}: the gradient of "
            f"elements of {name} is nothing but roundings, and the optimiser moves them anyway"
        )
        return LayoutFinding(
            passed=True,
            reason=reason,
            largest=self._largest,
            steps=step + 1,
            limit=reason,
        )

    def _start(self) -> LayoutFinding | None:
        """Compare names and first weights."""
        names = {each.name for each in self._reference.initial}
        known = {each.name for found in self._ours for each in found.initial}
        missing = sorted(names - known)
        different = self._different_start()
        is_divided = missing or any(each.parts for each in self._ours)
        if is_divided and different is not None and different.rank:
            return self._start_of_rank(different)
        if missing:
            unknown = sorted({name for found in self._ours for name in found.unknown})
            beside = f", but {some(unknown)}" if unknown else ""
            have = "has" if self._reference_ranks == 1 else "have"
            return LayoutFinding(
                passed=None,
                reason=f"no rank has {some(missing)} as {self._words} {have} it{beside}",
                tensor=missing[0],
            )
        if different is not None:
            return LayoutFinding(
                passed=False,
                kind="start",
                reason=f"{different.name} of rank {different.rank} differs before the first step; "
                "seed every process equally (torch.manual_seed), or let rank 0 send its weights",
                step=0,
                tensor=different.name,
            )
        return self._left_out()

    def _left_out(self) -> LayoutFinding | None:
        """Find places of a tensor that no rank has, where the script divides it by hand."""
        ranges: dict[str, list[PartOfTensor]] = {}
        for part in (part for found in self._ours for part in found.parts):
            ranges.setdefault(part.name, []).append(part)
        unknown = {name for found in self._ours for name in found.unknown}
        for name, parts in ranges.items():
            reached = parts[0].size if name in unknown else 0
            for each in sorted(parts, key=lambda part: part.start):
                if each.start > reached:
                    break
                reached = max(reached, each.end)
            if reached < parts[0].size:
                return LayoutFinding(
                    passed=False,
                    kind="update",
                    reason=f"ranks have parts of {name}, and none has its place {reached} of "
                    f"{parts[0].size}, which nobody steps",
                    step=0,
                    tensor=name,
                )
        return None

    def _different_start(self) -> _Start | None:
        """Return the first weight of a rank that is another one than in the reference."""
        return next(
            (
                _Start(each.name, rank)
                for rank, found in enumerate(self._ours)
                for each in found.initial
                if each.difference_l2 > _EQUAL_START * each.l2
            ),
            None,
        )

    def _start_of_rank(self, different: _Start) -> LayoutFinding:
        """Say which whole weight of a rank differs where others are divided among ranks."""
        return LayoutFinding(
            passed=False,
            kind="start-of-rank",
            reason=f"{different.name} of rank {different.rank} differs from that of rank 0 and of "
            f"{self._words} before the first step",
            step=0,
            tensor=different.name,
        )

    def _of_update(self, theirs: Update, own: Sequence[Update]) -> LayoutFinding | None:
        step = theirs.step
        samples = samples_fault(
            [theirs.samples or [], *(each.samples or [] for each in own)],
            self._words,
            self._rows[step] if step < len(self._rows) else (),
        )
        before = self._before_gradient(theirs, own, has_samples=samples is None)
        if before is not None:
            return before
        gradient = self._first_difference(theirs, self._made_up(theirs, own), "gradient")
        if gradient is not None and samples is None and self._is_inside(theirs, own, gradient):
            gradient = None
        if gradient is None and samples is None:
            weights = self._first_difference(theirs, own, "change")
            if weights is not None:
                return self._of_weights(step, weights)
            return self._drift(step, own)
        if gradient is None:
            return None  # equal gradients show more than checksums of samples
        if samples is not None:
            has_rows = self._has_rows_of_reference(theirs, own)
            labels = (
                f"the model gets the rows of {self._words}, but the gradient of {gradient.name} "
                "differs: samples have other labels or weights"
            )
            return LayoutFinding(
                passed=False,
                kind="labels" if has_rows else "samples",
                reason=labels if has_rows else samples,
                step=step,
                tensor=gradient.name,
            )
        return self._of_gradient(theirs, own, gradient)

    def _made_up(self, theirs: Update, own: Sequence[Update]) -> Sequence[Update]:
        """Return gradients as a learning rate makes them that makes up for their common factor."""
        scale = self._scales.get(_key(theirs), 1.0)
        factor = _common([e.factor for e in _tensors(own, "gradient") if e.factor and e.l2])
        if factor is None or not math.isclose(factor * scale, 1.0, rel_tol=SAME_FACTOR):
            return own
        return [replace(e, gradient=[g.times(scale) for g in e.gradient]) for e in own]

    def _is_inside(self, theirs: Update, own: Sequence[Update], gradient: ComparedTensor) -> bool:
        """Return whether optimisers exchange gradients in their step, and make the right one.

        Ranks have gradients of their own before it, or one rank alone has the tensor.
        """
        has_own = _ranks_with(own, gradient.name) < len(own)
        has_own |= not _equal_on_ranks(own, gradient.name)
        if not has_own or _is_multiple(gradient) or not all(each.change for each in own):
            return False
        return self._first_difference(theirs, own, "change") is None

    def _before_gradient(
        self, theirs: Update, own: Sequence[Update], *, has_samples: bool
    ) -> LayoutFinding | None:
        """Return a difference from which another gradient follows.

        has_samples: ranks have the samples of the reference.
        """
        if (reason := shifted_rows(theirs, own)) is not None:
            return LayoutFinding(passed=False, kind="inputs", reason=reason, step=theirs.step)
        return self._lost_update(theirs, own) if has_samples else None

    def _lost_update(self, theirs: Update, own: Sequence[Update]) -> LayoutFinding | None:
        """Find weights that do not keep what the step before has changed, as all others do."""
        before = self._theirs_by_key.get((theirs.optimizer, theirs.step - 1))
        if before is None or theirs.begin:
            return None
        rounded = self._rounded_updates.get(_key(before))
        noise = set() if rounded is None else _noise(rounded)
        moved = {each.name: each.l2 for each in before.change if each.name not in noise}
        for rank, update in enumerate(own):
            for each in update.begin:
                change = moved.get(each.name, 0.0)
                room = _LOST_SHARE * change + _EQUAL_START * each.l2
                if change and each.difference_l2 > room:
                    return LayoutFinding(
                        passed=False,
                        kind="update",
                        reason=f"the optimiser moves {each.name} as in {self._words}, but on rank "
                        f"{rank} it has another value when the next step begins: the update is "
                        "lost or overwritten between steps",
                        step=before.step,
                        tensor=each.name,
                    )
        return None

    def _first_difference(
        self, theirs: Update, own: Sequence[Update], kind: str
    ) -> ComparedTensor | None:
        """Return the tensor that differs most beyond its limit; None if none does."""
        rounded = self._rounded_updates.get(_key(theirs))
        changes = {} if rounded is None else _by_name(getattr(rounded, kind))
        noise = set() if rounded is None or kind == "gradient" else _noise(rounded)
        every = _tensors(own, kind)
        whole = math.hypot(*(each.l2 for each in _by_name(every).values()))
        base = self._base(theirs)
        worst: ComparedTensor | None = None
        beyond = 1.0
        for each in every:
            if each.name in noise:
                continue
            scale = each.l2 + NOISE_SHARE * whole
            if not scale:
                scale = 1.0
            measured = changes.get(each.name)
            room = 0.0 if measured is None else ROOM * measured.difference_l2 / scale
            limit = max(base, min(room, self._most(theirs)))
            known = math.sqrt(max(0.0, each.difference_l2**2 - each.noise_l2**2))
            share = known / scale / limit
            self._largest = max(self._largest, min(share, 1.0))
            if share > beyond:
                worst, beyond = each, share
        return worst

    def _base(self, theirs: Update) -> float:
        low = any(each.low_precision for each in (self._reference, *self._ours))
        kind = "bf16" if low else "fp32"
        return tolerance(kind, kind, 1).gradient * (theirs.step + 1)

    def _most(self, theirs: Update) -> float:
        """Return the smallest mistake that must be found: a part of a sample's share."""
        batch = len(theirs.samples or ()) or 1
        return min(max(LEAST_MISTAKE, 1 / (2 * batch)), MOST_DIFFERENCE) * (theirs.step + 1)

    def _of_weights(self, step: int, worst: ComparedTensor) -> LayoutFinding:
        by = "" if worst.factor is None else f", by a factor of {worst.factor:.2f}"
        return LayoutFinding(
            passed=False,
            kind="update",
            reason=f"gradients agree, but the optimiser moves {worst.name} differently{by}: its "
            "state or its learning rate differs",
            step=step,
            tensor=worst.name,
            factor=worst.factor,
        )

    def _drift(self, step: int, own: Sequence[Update]) -> LayoutFinding | None:
        """Find a replica whose parameters differ from another's."""
        first: dict[str, tuple[int, int]] = {}
        moved = {each.name for update in own for each in update.change}
        for rank, update in enumerate(own):
            for each in update.weights:
                if each.crc32 is None or each.name not in moved:
                    continue
                where, crc32 = first.setdefault(each.name, (rank, each.crc32))
                if crc32 != each.crc32:
                    return LayoutFinding(
                        passed=False,
                        kind="replicas",
                        reason=f"{each.name} of rank {rank} is no longer that of rank {where}: "
                        "replicas drift apart",
                        step=step,
                        tensor=each.name,
                    )
        return None

    def _of_gradient(
        self, theirs: Update, own: Sequence[Update], worst: ComparedTensor
    ) -> LayoutFinding:
        """Name the module and the likely cause of a gradient that differs."""
        first = self._modules.first_difference(theirs, own)
        is_exchanged = _equal_on_ranks(own, worst.name)
        if first.module is not None and first.is_of_loss and theirs.drew and is_exchanged:
            return LayoutFinding(
                passed=False,
                kind="random",
                reason=f"the gradient of {worst.name} differs: random numbers are drawn after "
                f"{first.module.name}, as by dropout",
                step=theirs.step,
                module=first.module.name,
                tensor=worst.name,
            )
        factors = [e.factor for e in _tensors(own, "gradient") if e.factor is not None and e.l2]
        factor = _common(factors)
        reduction = self._of_reduction(theirs, own, worst, factor, is_exchanged=is_exchanged)
        by = "" if factor is None else f" (factor {factor:.2f})"
        is_fault = reduction or self._is_exact(theirs, own, first)
        return LayoutFinding(
            passed=False,
            kind="gradient" if is_fault else first.kind,
            reason=f"the gradient of {worst.name} differs{by}: {reduction or first.sentence}",
            step=theirs.step,
            module=None if first.module is None else first.module.name,
            tensor=worst.name,
            factor=factor,
            is_within=first.kind == "gradient" and not first.is_of_loss,
        )

    def _has_rows_of_reference(self, theirs: Update, own: Sequence[Update]) -> bool:
        """Return whether ranks together give the model the rows of the reference in this step.

        They fetch as many samples, and draw no other random numbers.
        """
        samples = [len(each.samples or ()) for each in (theirs, *own)]
        if samples[0] != sum(samples[1:]) or _draw_others(theirs, own):
            return False
        if theirs.step >= len(self._rows):
            return False
        whole, *ranks = self._rows[theirs.step]
        return bool(whole) and Counter(chain.from_iterable(ranks)) == Counter(whole)

    def _is_exact(self, theirs: Update, own: Sequence[Update], first: ModuleDifference) -> bool:
        """Return whether a module must compute what it does in the reference.

        One that has some of the rows may combine them, as by their statistics.
        """
        if first.kind != "module" or first.module is None:
            return False
        return not _draw_others(theirs, own) and self._modules.has_all_rows(
            theirs.step, first.module.name
        )

    def _of_reduction(
        self,
        theirs: Update,
        own: Sequence[Update],
        worst: ComparedTensor,
        factor: float | None,
        *,
        is_exchanged: bool,
    ) -> str | None:
        """Return the mistake of the exchange between ranks that explains the difference."""
        ranks, passes, local = len(own), len(theirs.losses), self._modules.local_factor(theirs.step)
        is_whole = all(Counter(e.samples) == Counter(theirs.samples) for e in own if e.samples)
        expected = 1.0 if is_whole and theirs.samples else ranks / self._reference_ranks
        is_local = factor is not None and local is not None and is_near(local / expected, factor)
        tied = (names for found in self._ours for names in found.tied if worst.name in names)
        names = next(tied, [])
        counts = [] if is_whole else sorted({len(each.samples or ()) for each in own})
        scales = _own_scales(own, worst.name) or _scales_of_parts(own)
        by_rank = ", ".join(f"{scale:.4g} on rank {rank}" for rank, scale in enumerate(scales))
        what = f"that of {worst.name}" if _ranks_with(own, worst.name) > 1 else "their gradients"
        how = "by numbers of their own, as by a norm of their own"
        causes = (
            (scales, f"ranks multiply {what} {how}: {by_rank}"),
            (
                not is_exchanged,
                f"ranks have gradients of their own, that of {worst.name} was not exchanged",
            ),
            (
                is_local and passes > 1 and is_near(factor, passes),
                f"gradients of {passes} accumulated passes were not divided",
            ),
            (
                is_local and not is_near(factor, 1.0),
                f"the loss of each rank is {factor or 0:.2f} times as large",
            ),
            (
                is_near(factor, ranks),
                f"gradients were summed over {ranks} ranks instead of averaged",
            ),
            (is_near(factor, 1 / ranks), f"gradients were divided by {ranks} once too often"),
            (
                names and is_near(worst.factor, ranks),
                f"the tied weight {' = '.join(names)} was reduced more than once",
            ),
            (
                is_near(worst.factor, ranks) and _is_multiple(worst),
                f"that of {worst.name} was summed over {ranks} ranks",
            ),
            (len(counts) > 1, f"ranks with {some(counts)} samples were averaged without weights"),
            (any(each.clipped for each in own), "gradients were clipped before they were reduced"),
        )
        return next((sentence for applies, sentence in causes if applies), None)


def _draws(updates: Sequence[Update]) -> bool:
    """Return whether steps draw random numbers of torch; yes where no two steps can tell it."""
    states = [
        {name: state for name, state in each.generators.items() if name in {"torch", "cuda"}}
        for each in updates
        if not each.optimizer
    ]
    return len(states) < 2 or any(one != next_one for one, next_one in pairwise(states))


def _draw_others(theirs: Update, own: Sequence[Update]) -> bool:
    """Return whether a rank draws other random numbers than the reference."""
    return any(each.generators != theirs.generators for each in own)


def _key(update: Update) -> tuple[int, int]:
    return update.optimizer, update.step


def _by_key(updates: Iterable[Update]) -> dict[tuple[int, int], Update]:
    return {_key(update): update for update in updates}


def _noise(rounded: Update) -> set[str]:
    """Return the tensors whose gradient is nothing but roundings.

    An optimiser as Adam, which divides by the gradient's size, moves them by any amount.
    """
    return {e.name for e in rounded.gradient if e.difference_l2 > ROUNDING_ONLY * e.l2}


def _by_name(tensors: Iterable[ComparedTensor]) -> dict[str, ComparedTensor]:
    return {each.name: each for each in tensors}


def _tensors(updates: Iterable[Update], kind: str) -> list[ComparedTensor]:
    return [each for update in updates for each in getattr(update, kind)]


def _common(factors: Sequence[float]) -> float | None:
    """Return the factor that all tensors share; None if they do not share one."""
    if not factors:
        return None
    middle = float(np.median(factors))
    near = [abs(factor - middle) <= SAME_FACTOR * abs(middle) for factor in factors]
    return middle if sum(near) >= 0.9 * len(near) else None


def _own_scales(own: Sequence[Update], name: str) -> list[float]:
    """Return the factors of a gradient on the ranks if they differ, and nothing else does."""
    those = [each for update in own for each in update.gradient if each.name == name]
    scales = [each.factor for each in those if each.factor is not None and _is_multiple(each)]
    differ = any(not math.isclose(s, scales[0], rel_tol=_SAME_SCALE) for s in scales)
    return scales if len(scales) == len(own) and differ else []


def _scales_of_parts(own: Sequence[Update]) -> list[float]:
    """Return the factor that all gradients of each rank share, where they have other tensors."""
    scales = []
    for update in own:
        factors = [e.factor for e in update.gradient if e.factor is not None and e.l2]
        common = _common(factors) if all(map(_is_multiple, update.gradient)) else None
        if common is None:
            return []
        scales.append(common)
    names = [{each.name for each in update.gradient} for update in own]
    differ = any(not math.isclose(s, scales[0], rel_tol=_SAME_SCALE) for s in scales)
    return scales if differ and any(each != names[0] for each in names) else []


def _is_multiple(tensor: ComparedTensor) -> bool:
    """Return whether it is a multiple of the reference's tensor."""
    if tensor.factor is None:
        return False
    apart = abs(tensor.factor - 1) * tensor.l2
    return math.isclose(tensor.difference_l2, apart, rel_tol=SAME_FACTOR)


def _ranks_with(own: Sequence[Update], name: str) -> int:
    return sum(any(each.name == name for each in update.gradient) for update in own)


def _equal_on_ranks(own: Sequence[Update], name: str) -> bool:
    found = {each.crc32 for update in own for each in update.gradient if each.name == name}
    return len(found) <= 1
