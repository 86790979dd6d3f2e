"""Compare what modules computed for each sample, to find the first one that differs.

A sample has one place in the reference, and one on some rank. Outputs agree up to rounding;
gradients do up to one number, because the loss of a rank is a mean over its own samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from paceline.analysis.equivalence.tolerances import ROOM
from paceline.measure.records.own_steps import ModuleCall, Observed, Update

SAME_FACTOR = 0.02  # spread of the factors of tensors that were all multiplied by one number
_NORMALISES = ("BatchNorm", "SyncBatchNorm", "InstanceNorm")

Key = tuple[str, str, str]  # direction, module, sample
Numbers = Mapping[Key, list[float]]
# loss: gradients differ in a way that a loss which compares rows explains
Kind = Literal[
    "none",
    "start",
    "start-of-rank",
    "samples",
    "labels",
    "inputs",
    "random",
    "statistics",
    "module",
    "loss",
    "gradient",
    "update",
    "replicas",
    "not-run",
]


@dataclass(frozen=True, slots=True)
class ModuleDifference:
    """The first module that computes something else than in the reference, and how.

    sentence: of the cause, after "the gradient of ... differs".
    """

    module: ModuleCall | None
    kind: Kind
    sentence: str | None
    is_of_loss: bool = False


class ModuleComparison:
    """Compares the calls of modules of all ranks with those of the reference.

    rounded: calls of a reference whose outputs have other roundings; empty: unknown. ours: of each
    rank.
    """

    def __init__(
        self,
        reference: Observed,
        rounded: Sequence[ModuleCall],
        ours: Sequence[Sequence[ModuleCall]],
    ) -> None:
        self._calls, self._rounded, self._ours = reference.calls, rounded, ours
        self._samples_of_step = {
            each.step: each.samples or [] for each in reference.updates if not each.optimizer
        }

    def has_all_rows(self, step: int, name: str) -> bool:
        """Return whether each rank that has a module calls it with as many rows as the reference.

        Stages of a pipeline and divided layers do, ranks with rows of their own do not.
        """
        expected, *found = [
            sum(len(call.samples) for call in calls if (call.step, call.name) == (step, name))
            for calls in (self._calls, *self._ours)
        ]
        return any(found) and all(rows in (0, expected) for rows in found)

    def local_factor(self, step: int) -> float | None:
        """Return the ratio of the gradients at the last module, before they are reduced.

        It is the number of ranks over that of the reference where each takes the mean over its
        share of the samples.
        """
        theirs = [c for c in self._calls if c.step == step and c.backward is not None]
        own = self._own_numbers(step)
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

    def first_difference(self, update: Update, own_updates: Sequence[Update]) -> ModuleDifference:
        """Return the first module whose output differs, else whose gradient does, in order."""
        step = update.step
        theirs = [call for call in self._calls if call.step == step]
        rounded = _numbers(c for c in self._rounded if c.step == step)
        own = self._own_numbers(step)
        for call in theirs:
            if self._differs(call, "forward", rounded, own):
                return ModuleDifference(call, _kind_of_output(call), _of_output(call))
        with_gradient = [call for call in reversed(theirs) if call.backward is not None]
        for call in with_gradient:
            if self._differs(call, "backward", rounded, own):
                if call.name == with_gradient[0].name:
                    return _of_loss(call, own)
                sentence = f"{_named(call)} is the first module that computes another gradient"
                return ModuleDifference(call, "gradient", sentence)
        return (
            _lost_rows(with_gradient, own)
            or _scaled_between(with_gradient, own)
            or self._of_no_module(theirs, own, [update, *own_updates])
        )

    def _of_no_module(
        self,
        theirs: Sequence[ModuleCall],
        own: Numbers,
        updates: Sequence[Update],
    ) -> ModuleDifference:
        """Say what is known of a gradient that differs although no module does.

        A loss may depend on which rows are together. It shows only where all rows are compared.
        """
        known = any(("forward", each.name, s) in own for each in theirs for s in each.samples)
        if not known or any(each.has_unknown_rows for each in updates):
            sentence = (
                "no module is known to compute something else, but not all outputs could be "
                "compared row by row"
            )
            return ModuleDifference(None, "module", sentence)
        sentence = (
            "all modules agree, so the difference arises outside of them, as where gradients are "
            "added up or reduced"
        )
        return ModuleDifference(None, "loss", sentence)

    def _own_numbers(self, step: int) -> dict[Key, list[float]]:
        """Return the numbers of the ranks' samples, see `_numbers`.

        A rank that gets no batch knows its samples by their places in it.
        """
        samples = self._samples_of_step.get(step, [])
        calls = (call for each in self._ours for call in each if call.step == step)
        return _numbers(
            replace(call, samples=[_placed(each, samples) for each in call.samples])
            for call in calls
        )

    def _differs(
        self,
        call: ModuleCall,
        kind: str,
        rounded: Numbers,
        own: Numbers,
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


def _kind_of_output(module: ModuleCall) -> Kind:
    if _normalises(module):
        return "statistics"
    return "random" if "Dropout" in module.kind else "module"


def _of_output(module: ModuleCall) -> str:
    """Return what the first module that computes another output says about the cause."""
    if _normalises(module):
        return f"{_named(module)} uses the statistics of each rank's samples"
    return f"{_named(module)} is the first module that computes another output"


def _named(module: ModuleCall) -> str:
    return f"{module.name or 'the model'} ({module.kind})"


def _of_loss(call: ModuleCall, own: Numbers) -> ModuleDifference:
    """Say how the gradient of the loss at the last module differs, of which outputs agree."""
    if _are_multiples(call, own):
        return _of_weights(call)
    sentence = (
        f"outputs agree, but not the gradient of the loss at {call.name}, and not by a factor: "
        "samples have other targets, or the loss compares them with other ones"
    )
    return ModuleDifference(call, "loss", sentence, is_of_loss=True)


def _of_weights(call: ModuleCall) -> ModuleDifference:
    sentence = (
        f"outputs agree, but not the gradient of the loss at {call.name or 'the model'}: samples "
        "have unequal weights on the ranks, as by a mean over the valid labels of each rank"
    )
    return ModuleDifference(call, "gradient", sentence, is_of_loss=True)


def _are_multiples(call: ModuleCall, own: Numbers) -> bool:
    """Return whether each row's gradient is that of the reference times a number."""
    for (norm, projection), sample in zip(call.backward or (), call.samples, strict=False):
        found = own.get(("backward", call.name, sample))
        if found is None or not norm or not found[0]:
            continue
        apart = abs(abs(found[1]) / found[0] - abs(projection) / norm)
        if apart > SAME_FACTOR * max(abs(projection) / norm, SAME_FACTOR):
            return False
    return True


def _lost_rows(with_gradient: Sequence[ModuleCall], own: Numbers) -> ModuleDifference | None:
    """Find rows whose gradient does not arrive at a module that has computed them."""
    for call in with_gradient:
        lost = [
            sample
            for sample in call.samples
            if ("forward", call.name, sample) in own and ("backward", call.name, sample) not in own
        ]
        if lost:
            of_all = sum(len(c.samples) for c in with_gradient if c.name == call.name)
            sentence = (
                f"no gradient arrives at {call.name} for {len(lost)} of {of_all} samples of the "
                "step"
            )
            return ModuleDifference(call, "gradient", sentence)
    return None


def _scaled_between(with_gradient: Sequence[ModuleCall], own: Numbers) -> ModuleDifference | None:
    """Find a module at which gradients are multiplied, in the order of the backward pass."""
    last: float | None = None
    for call in with_gradient:
        pairs = [
            (found[0], values[0])
            for values, sample in zip(call.backward or (), call.samples, strict=False)
            if (found := own.get(("backward", call.name, sample))) is not None
        ]
        sizes = np.linalg.norm(np.array(pairs), axis=0) if pairs else np.zeros(2)
        if not sizes[1]:
            continue
        factor = float(sizes[0] / sizes[1])
        is_last = call.name == with_gradient[0].name
        if last and is_last and not is_near(factor, last):
            return _of_weights(call)
        if last and not is_near(factor, last):
            sentence = (
                f"gradients are multiplied by {factor / last:.2f} on their way to {call.name}"
            )
            return ModuleDifference(call, "gradient", sentence)
        last = factor
    return None


def _placed(sample: str, samples: Sequence[str]) -> str:
    if not sample.startswith("#"):
        return sample
    place = int(sample[1:])
    return samples[place] if place < len(samples) else sample


def _normalises(module: ModuleCall) -> bool:
    return module.kind.startswith(_NORMALISES)


def is_near(factor: float | None, expected: float) -> bool:
    return factor is not None and abs(factor - expected) <= SAME_FACTOR * expected


def _numbers(calls: Iterable[ModuleCall]) -> dict[Key, list[float]]:
    """Return the numbers of each sample by direction, module and sample."""
    return {key: values for call in calls for key, values in _of_call(call)}


def _of_call(call: ModuleCall) -> Iterator[tuple[Key, list[float]]]:
    for kind, rows in (("forward", call.forward), ("backward", call.backward)):
        for sample, values in zip(call.samples, rows or (), strict=False):
            yield (kind, call.name, sample), values
