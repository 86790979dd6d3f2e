"""Judge what ranks observed of a script under `paceline verify`: first difference, and its cause.

A layout is compared with the reference, one process or several ranks, update by update: samples,
outputs of modules, gradients, weights. A tensor may differ by the limits of `tolerances`, and by
four times the change that roundings cause in the reference, where that was measured by training it
once more.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from paceline.analysis.equivalence.sample_log import some
from paceline.analysis.equivalence.tolerances import LEAST_MISTAKE, ROOM, tolerance
from paceline.analysis.equivalence.trained_rows import rows_of_steps, samples_fault, words_of
from paceline.measure.records.own_steps import (
    ComparedTensor,
    ModuleCall,
    Observed,
    TrainedRows,
    Update,
)
from paceline.measure.records.phases import NOISE_SHARE, ROUNDING_ONLY

_SAME_FACTOR = 0.02  # spread of the factors of tensors that were all multiplied by one number
_SAME_SCALE = 1e-4  # relative difference of two numbers by which ranks multiply a gradient
_EQUAL_START = 1e-6
_NORMALISES = ("BatchNorm", "SyncBatchNorm", "InstanceNorm")


Kind = Literal[
    "none", "start", "samples", "random", "module", "gradient", "update", "replicas", "not-run"
]


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
    reference: str = "one process"


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
    return replace(found, reference=words)


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
        self._rounded_calls = changed.calls
        self._largest = 0.0

    def finding(self) -> LayoutFinding:
        start = self._start()
        if start is not None:
            return start
        updates = [_by_key(each.updates) for each in self._ours]
        compared = 0
        for theirs in self._reference.updates:
            own = [found[_key(theirs)] for found in updates if _key(theirs) in found]
            if len(own) < len(self._ours):
                break
            found = self._of_update(theirs, own)
            if found is not None:
                return found
            compared = theirs.step + 1
        if not compared:
            return LayoutFinding(passed=None, reason="no step was taken by all ranks")
        return LayoutFinding(
            passed=True,
            reason=f"{compared} steps agree",
            largest=self._largest,
            steps=compared,
        )

    def _start(self) -> LayoutFinding | None:
        """Compare names and first weights."""
        names = {each.name for each in self._reference.initial}
        known = {each.name for found in self._ours for each in found.initial}
        missing = sorted(names - known)
        if missing:
            unknown = sorted({name for found in self._ours for name in found.unknown})
            beside = f", but {some(unknown)}" if unknown else ""
            have = "has" if self._reference_ranks == 1 else "have"
            return LayoutFinding(
                passed=None,
                reason=f"no rank has {some(missing)} as {self._words} {have} it{beside}",
                tensor=missing[0],
            )
        for rank, found in enumerate(self._ours):
            for each in found.initial:
                if each.difference_l2 > _EQUAL_START * each.l2:
                    return LayoutFinding(
                        passed=False,
                        kind="start",
                        reason=f"{each.name} of rank {rank} differs before the first step; seed "
                        "every process equally (torch.manual_seed), or let rank 0 send its weights",
                        step=0,
                        tensor=each.name,
                    )
        return None

    def _of_update(self, theirs: Update, own: Sequence[Update]) -> LayoutFinding | None:
        step = theirs.step
        samples = samples_fault(
            [theirs.samples or [], *(each.samples or [] for each in own)],
            self._words,
            self._rows[step] if step < len(self._rows) else (),
        )
        gradient = self._first_difference(theirs, own, "gradient")
        if gradient is None and samples is None:
            weights = self._first_difference(theirs, own, "change")
            if weights is not None:
                return self._of_weights(step, weights)
            return self._drift(step, own)
        if gradient is None:
            return None  # equal gradients show more than checksums of samples
        if samples is not None:
            return LayoutFinding(
                passed=False, kind="samples", reason=samples, step=step, tensor=gradient.name
            )
        return self._of_gradient(theirs, own, gradient)

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
            share = each.difference_l2 / scale / limit
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
        return max(LEAST_MISTAKE, 1 / (2 * batch)) * (theirs.step + 1)

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
        first: dict[str, tuple[int, str]] = {}
        moved = {each.name for update in own for each in update.change}
        for rank, update in enumerate(own):
            for each in update.weights:
                if each.sha256 is None or each.name not in moved:
                    continue
                where, sha256 = first.setdefault(each.name, (rank, each.sha256))
                if sha256 != each.sha256:
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
        module, direction = self._first_module(theirs.step)
        is_exchanged = _equal_on_ranks(own, worst.name)
        if module is not None and direction == "loss" and theirs.drew and is_exchanged:
            return LayoutFinding(
                passed=False,
                kind="random",
                reason=f"the gradient of {worst.name} differs: random numbers are drawn after "
                f"{module.name}, as by dropout",
                step=theirs.step,
                module=module.name,
                tensor=worst.name,
            )
        factors = [e.factor for e in _tensors(own, "gradient") if e.factor is not None and e.l2]
        factor = _common(factors)
        reduction = self._of_reduction(theirs, own, worst, factor, is_exchanged=is_exchanged)
        cause = (
            reduction
            or _of_module(module, direction)
            or "all modules agree, so the difference arises when gradients are reduced"
        )
        by = "" if factor is None else f" (factor {factor:.2f})"
        return LayoutFinding(
            passed=False,
            kind="gradient" if reduction else _kind_of(module, direction),
            reason=f"the gradient of {worst.name} differs{by}: {cause}",
            step=theirs.step,
            module=None if module is None else module.name,
            tensor=worst.name,
            factor=factor,
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
        ranks, passes, local = len(own), len(theirs.losses), self._local_factor(theirs.step)
        expected = ranks / self._reference_ranks
        is_local = factor is not None and local is not None and _near(local / expected, factor)
        tied = (names for found in self._ours for names in found.tied if worst.name in names)
        names = next(tied, [])
        counts = sorted({len(each.samples or ()) for each in own})
        scales = _own_scales(own, worst.name)
        by_rank = ", ".join(f"{scale:.4g} on rank {rank}" for rank, scale in enumerate(scales))
        how = "by numbers of their own, as by a norm of their own"
        causes = (
            (scales, f"ranks multiply that of {worst.name} {how}: {by_rank}"),
            (
                not is_exchanged,
                f"ranks have gradients of their own, that of {worst.name} was not exchanged",
            ),
            (
                is_local and passes > 1 and _near(factor, passes),
                f"gradients of {passes} accumulated passes were not divided",
            ),
            (
                is_local and not _near(factor, 1.0),
                f"the loss of each rank is {factor or 0:.2f} times as large",
            ),
            (_near(factor, ranks), f"gradients were summed over {ranks} ranks instead of averaged"),
            (_near(factor, 1 / ranks), f"gradients were divided by {ranks} once too often"),
            (
                names and _near(worst.factor, ranks),
                f"the tied weight {' = '.join(names)} was reduced more than once",
            ),
            (
                _near(worst.factor, ranks) and _is_multiple(worst),
                f"that of {worst.name} was summed over {ranks} ranks",
            ),
            (len(counts) > 1, f"ranks with {some(counts)} samples were averaged without weights"),
            (any(each.clipped for each in own), "gradients were clipped before they were reduced"),
        )
        return next((sentence for applies, sentence in causes if applies), None)

    def _local_factor(self, step: int) -> float | None:
        """Return the ratio of the gradients at the last module, before they are reduced.

        It is the number of ranks over that of the reference where each takes the mean over its
        share of the samples.
        """
        theirs = [c for c in self._reference.calls if c.step == step and c.backward is not None]
        own = _numbers(c for found in self._ours for c in found.calls if c.step == step)
        if not theirs:
            return None
        last = theirs[-1]
        pairs = [
            (values[0], own["backward", last.name, sample][0])
            for values, sample in zip(last.backward or (), last.samples, strict=True)
            if ("backward", last.name, sample) in own
        ]
        if not pairs:  # the ranks hold the output in parts
            return None
        expected, found = (float(np.linalg.norm(part)) for part in zip(*pairs, strict=True))
        return found / expected if expected else None

    def _first_module(self, step: int) -> tuple[ModuleCall | None, str]:
        """Return the first module whose output differs, else whose gradient does, in order."""
        theirs = [call for call in self._reference.calls if call.step == step]
        rounded = _numbers(c for c in self._rounded_calls if c.step == step)
        own = _numbers(c for found in self._ours for c in found.calls if c.step == step)
        for call in theirs:
            if self._differs(call, "forward", rounded, own):
                return call, "forward"
        with_gradient = [call for call in reversed(theirs) if call.backward is not None]
        for place, call in enumerate(with_gradient):
            if self._differs(call, "backward", rounded, own):
                return call, "backward" if place else "loss"
        return None, ""

    def _differs(
        self,
        call: ModuleCall,
        kind: str,
        rounded: Mapping[tuple[str, str, str], list[float]],
        own: Mapping[tuple[str, str, str], list[float]],
    ) -> bool:
        expected = getattr(call, kind)
        rows = [
            (values, own[kind, call.name, sample], rounded.get((kind, call.name, sample), values))
            for values, sample in zip(expected, call.samples, strict=True)
            if (kind, call.name, sample) in own
        ]
        if not rows:
            return False
        theirs, ours, changed = (np.array(part) for part in zip(*rows, strict=True))
        scale = float(np.linalg.norm(theirs[:, 0])) or 1.0
        if kind == "backward":  # the loss of a rank is a mean over its own samples
            norm = float(np.linalg.norm(ours[:, 0]))
            ours = ours * (scale / norm if norm else 1.0)
            norm = float(np.linalg.norm(changed[:, 0]))
            changed = changed * (scale / norm if norm else 1.0)
        room = ROOM * float(np.linalg.norm(changed - theirs)) / scale
        return float(np.linalg.norm(ours - theirs)) / scale > max(2.0**-11 * (call.step + 1), room)


def _of_module(module: ModuleCall | None, direction: str) -> str | None:
    """Return what the first module that differs says about the cause."""
    if module is None:
        return None
    if direction == "forward" and _normalises(module):
        return f"{module.name} ({module.kind}) uses the statistics of each rank's samples"
    if direction == "forward":
        return f"{module.name} ({module.kind}) is the first module that computes another output"
    if direction == "loss":
        return (
            f"outputs agree, but not the gradient of the loss at {module.name}: ranks weight "
            "samples differently, as by a mean over the valid labels of each rank"
        )
    return f"{module.name} ({module.kind}) is the first module that computes another gradient"


def _kind_of(module: ModuleCall | None, direction: str) -> Kind:
    """Return what a gradient that differs shows, by the first module that differs."""
    if module is None or direction != "forward":
        return "gradient"
    return "random" if "Dropout" in module.kind or _normalises(module) else "module"


def _normalises(module: ModuleCall) -> bool:
    return module.kind.startswith(_NORMALISES)


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


def _numbers(calls: Iterable[ModuleCall]) -> dict[tuple[str, str, str], list[float]]:
    """Return the numbers of each sample by direction, module and sample."""
    return {key: values for call in calls for key, values in _of_call(call)}


def _of_call(call: ModuleCall) -> Iterator[tuple[tuple[str, str, str], list[float]]]:
    for kind, rows in (("forward", call.forward), ("backward", call.backward)):
        for sample, values in zip(call.samples, rows or (), strict=False):
            yield (kind, call.name, sample), values


def _common(factors: Sequence[float]) -> float | None:
    """Return the factor that all tensors share; None if they do not share one."""
    if not factors:
        return None
    middle = float(np.median(factors))
    near = [abs(factor - middle) <= _SAME_FACTOR * abs(middle) for factor in factors]
    return middle if sum(near) >= 0.9 * len(near) else None


def _near(factor: float | None, expected: float) -> bool:
    return factor is not None and abs(factor - expected) <= _SAME_FACTOR * expected


def _own_scales(own: Sequence[Update], name: str) -> list[float]:
    """Return the factors of a gradient on the ranks if they differ, and nothing else does."""
    those = [each for update in own for each in update.gradient if each.name == name]
    scales = [each.factor for each in those if each.factor is not None and _is_multiple(each)]
    differ = any(not math.isclose(s, scales[0], rel_tol=_SAME_SCALE) for s in scales)
    return scales if len(scales) == len(own) and differ else []


def _is_multiple(tensor: ComparedTensor) -> bool:
    """Return whether it is a multiple of the reference's tensor."""
    if tensor.factor is None:
        return False
    apart = abs(tensor.factor - 1) * tensor.l2
    return math.isclose(tensor.difference_l2, apart, rel_tol=_SAME_FACTOR)


def _equal_on_ranks(own: Sequence[Update], name: str) -> bool:
    found = {each.sha256 for update in own for each in update.gradient if each.name == name}
    return len(found) <= 1
