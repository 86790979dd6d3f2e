"""Allowed differences between two runs of the same training, and their derivation.

Distributing a batch changes the order in which its gradients are added, nothing else. Adding m
numbers in another order changes the sum by at most about m*u relative to the sum of magnitudes,
and by about sqrt(m)*u where roundings are independent (Higham, Accuracy and Stability of Numerical
Algorithms, 2nd ed., chapter 4; Higham and Mary, SIAM J. Sci. Comput. 41(5), 2019). With

- u = 2^-24, the unit roundoff of fp32 (IEEE 754);
- m = 2^18: the first convolution of AlexNet at batch 64 adds 64 x 55 x 55 = 2^17.6 terms a weight,
  so sqrt(m) = 2^9;
- 16 = 2^4 layers with weights (VGG16), through which the differences pass and add up,

the gradient of the first step may differ by 2^-24 * 2^9 * 2^4 = 2^-11 of its norm. The smallest
mistake that matters is one sample too many or too few in a batch of some hundred, about 2^-7; a
sum in place of a mean over two ranks is 1.

Rounding may do more, above all where layers normalise: a unit of ReLU that is nearly zero switches,
and a single one may move the gradient of a small batch by 1e-3 to 2e-2 (measured on four networks,
docs/results/raw/rounding.json: in a quarter of the batches, for some networks in all). So the
baseline measures the change of its own first gradient when the inputs change by 16 u. Four times
this change is allowed, at most half of one sample's share of the batch, or 2^-7 if that is more:
one sample too many or too few is still found.

Under bf16 autocast products are added in fp32 and results rounded, by at most u = 2^-8 and half of
that on average; sixteen layers forward and backward give 2^5 roundings: 2^-4. Against an fp32
baseline, units of ReLU and max-pooling also decide otherwise (measured: 0.21 on a small AlexNet),
hence 2^-2. Under fp16 and in products of float32 that are rounded to TF32 ("high"), u = 2^-11;
both limits are four times smaller there. Products of float32 with "medium" round to bf16. A
baseline of the same arithmetic measures its first gradient there, too.

Over n steps the differences grow: momentum sums them twice, as n^2, and later they grow
exponentially, because the loss is not convex (measured on a small AlexNet, learning rate 0.01,
relative to the update: 3e-5 after 1 step, 8e-3 after 24, 0.13 after 48). In deep nets units of
ReLU and max-pooling soon decide otherwise: with VGG16 at 224x224 the framework's own threads alone,
whose first gradient differs by 1e-5, give 0.025 after 7 steps. That is n^2 * 2^-11 and leaves no
room, so there is a factor of 4. Weights may differ by 4 n^2 times the gradient's tolerance, at most
a quarter of the distance that training moved them (fp32; half of it for bf16), which is what
mistakes still exceed: a sum for a mean over k ranks differs by k - 1, ranks that do not exchange
gradients by about sqrt(1 - 1/k). After `LONG_STEPS` steps rounding alone may have grown that far,
and the weights prove nothing; then steps are replayed from states of the baseline.

A unit that switches in one of the steps may do more (measured: in one of six trainings of a small
AlexNet 0.03 after 16 steps, 0.15 after 40 and 0.47 after 64, against at most 6e-4 in the others).
So the baseline also repeats the training, up to 64 steps, with inputs that change by 2^-20 (fp32
only). Where four times the change of its own weights is above the limit, its weights prove nothing.

The gradient of a bias before a batch normalisation, or of the keys' bias in attention, is zero, and
what is computed is nothing but roundings. The baseline finds such tensors: their first gradient
changes by a tenth or more. It is compared with the whole gradient, and what an optimiser as Adam
makes of it proves nothing.

Two replayed steps have little room for growth, but their gradients may be nearly zero, late in a
training, and so more sensitive than the first one. After them, a tensor may differ by 2^-4 of the
distance, or by four times its measured change. A tensor that hardly moves is compared with 2^-7 of
the distance of all. A learning rate that is wrong by a tenth is still found.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from paceline.measure.records.phases import (
    EARLY,
    EARLY_STEPS,
    FINAL,
    GRADIENT,
    LONG_STEPS,
    REPLAYED_STEPS,
    ROUNDOFF,
)

_LOW_ROUNDINGS, _SWITCHES = 2.0**5, 4.0  # factors, see above
ROOM = 4.0
LEAST_MISTAKE = 2.0**-7


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """Relative tolerances; `loss` and `gradient` are of step 1, `weights` after all steps.

    rounding: changes that the baseline has measured, by point. noise: tensors of which it has found
    nothing but roundings.
    """

    arithmetic: str  # of both, as in "fp32" or "bf16 against fp32"
    steps: int
    loss: float
    gradient: float
    rounding: Mapping[str, float] = field(default_factory=dict)
    noise: frozenset[str] = frozenset()

    @property
    def weights_judged(self) -> bool:
        """Return whether the final weights can decide."""
        return self.steps <= LONG_STEPS and self.judges(FINAL)

    @property
    def weights(self) -> float:
        return self.of_weights(self.steps)

    @property
    def early_weights(self) -> float:
        return self.of_weights(EARLY_STEPS)

    def of_weights(self, steps: int) -> float:
        """Return the limit for one tensor after some steps from the first weights."""
        return min(ROOM * self.gradient * steps**2, self._weights_limit)

    def at(self, point: str) -> float:
        """Return the limit for one tensor at a point of comparison."""
        of_weights = {FINAL: self.weights, EARLY: self.early_weights}
        return of_weights[point] if point in of_weights else self.of_replay(point)

    def steps_until(self, point: str) -> int:
        """Return the steps from equal weights to a point of comparison."""
        return {FINAL: self.steps, EARLY: EARLY_STEPS}.get(point, REPLAYED_STEPS)

    def of_replay(self, point: str) -> float:
        """Return the limit for one tensor after replayed steps."""
        measured = ROOM * self.rounding.get(point, 0.0)
        derived = 2.0**-4 if self.arithmetic == "fp32" else self._weights_limit
        return min(max(derived, measured), self._weights_limit)

    @property
    def _weights_limit(self) -> float:
        return 0.25 if self.arithmetic == "fp32" else 0.5

    def judges(self, point: str) -> bool:
        """Return whether rounding alone stays below the largest limit at a point."""
        return ROOM * self.rounding.get(point, 0.0) <= self._weights_limit


def tolerance(
    ours: str,
    baseline: str,
    steps: int,
    *,
    rounding: Mapping[str, float] | None = None,
    noise: Collection[str] = (),
    global_batch: int = 1,
) -> Tolerance:
    """Return the tolerance for a trial after `steps` steps.

    ours, baseline: their arithmetic, see `Training.arithmetic`. rounding: changes that the baseline
    has measured, by point. noise: tensors of which it has found nothing but roundings.
    global_batch: samples of a step.
    """
    arithmetic = ours if ours == baseline else f"{ours} against {baseline}"
    derived = gradient = _of_gradient(ours, baseline)
    measured = dict(rounding or {}) if ours == baseline else {}
    if GRADIENT in measured:
        most = max(LEAST_MISTAKE, 1 / (2 * global_batch))
        gradient = max(derived, min(ROOM * measured[GRADIENT], most))
    return Tolerance(
        arithmetic=arithmetic,
        steps=steps,
        # the loss is the end of the forward half of the same computation
        loss=min(derived, _of_gradient("bf16", "bf16")),
        gradient=gradient,
        rounding=measured,
        noise=frozenset(noise),
    )


def _of_gradient(ours: str, baseline: str) -> float:
    """Return the derived limit for the first gradient."""
    if ours == baseline == "fp32":
        return 2.0**-11
    rounded = _LOW_ROUNDINGS * max(ROUNDOFF[ours], ROUNDOFF[baseline])
    return rounded if ours == baseline else _SWITCHES * rounded
