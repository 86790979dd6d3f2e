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
baseline measures the change of its own first gradient when the inputs change by 2^-20. Four times
this change is allowed, at most half of one sample's share of the batch, or 2^-7 if that is more:
one sample too many or too few is still found.

Under bf16 autocast products are added in fp32 and results rounded to u = 2^-9; sixteen layers
forward and backward give 2^5 roundings: 2^-4. Against an fp32 baseline, units of ReLU and
max-pooling also decide otherwise (measured: 0.21 on a small AlexNet), hence 2^-2.

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

A single lost update is smaller: 1/n of the distance. So the baseline repeats the training, or the
replayed steps, with inputs that change by 2^-20, and all parameters together may differ by eight
times the change of this repetition, at least 2^-7. Over n <= 64 steps a lost update is at least
2^-6 where updates have about equal sizes. A gradient that is nearly zero, late in a training, is
relatively more sensitive than the first one. So a tensor of a replay may differ by four times its
own measured change, if that is more than derived above.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from paceline.records.comparison_points import GRADIENT, LONG_STEPS
from paceline.records.rows import RoundingChange

if TYPE_CHECKING:
    from paceline.spec.values import Precision

UNIT_ROUNDOFF_FP32 = 2.0**-24

Arithmetic = Literal["fp32", "bf16", "bf16 against fp32"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """Relative tolerances; `loss` and `gradient` are of step 1, `weights` after all steps.

    rounding: changes that the baseline has measured, by point.
    """

    arithmetic: Arithmetic
    steps: int
    loss: float
    gradient: float
    rounding: Mapping[str, RoundingChange] = field(default_factory=dict)

    @property
    def weights_judged(self) -> bool:
        """Return whether there were few enough steps to compare the final weights."""
        return self.steps <= LONG_STEPS

    @property
    def weights(self) -> float:
        return self.of_tensor(self.steps)

    def of_tensor(self, steps: int, replay: str | None = None) -> float:
        """Return the limit for one tensor after some steps from equal weights.

        replay: the point, of steps that were replayed.
        """
        most = _WEIGHTS_LIMIT[self.arithmetic]
        derived = min(_ROOM * self.gradient * steps**2, most)
        if replay not in self.rounding:
            return derived
        return max(derived, min(_ROOM * self.rounding[replay].tensor, most))

    def of_whole(self, steps: int, point: str) -> float:
        """Return the limit for all parameters together at a point, after some steps."""
        derived = self.of_tensor(steps)
        if point not in self.rounding:
            return derived
        measured = _ROOM_OF_WHOLE * self.rounding[point].whole
        return min(derived, max(_LEAST_MISTAKE, measured))


_GRADIENT: dict[Arithmetic, float] = {"fp32": 2.0**-11, "bf16": 2.0**-4, "bf16 against fp32": 0.25}
_ROOM, _ROOM_OF_WHOLE = 4.0, 8.0
_LEAST_MISTAKE = 2.0**-7
_WEIGHTS_LIMIT: dict[Arithmetic, float] = {"fp32": 0.25, "bf16": 0.5, "bf16 against fp32": 0.5}


def tolerance(
    ours: Precision,
    baseline: Precision,
    steps: int,
    *,
    rounding: Mapping[str, RoundingChange] | None = None,
    global_batch: int = 1,
) -> Tolerance:
    """Return the tolerance for a trial in precision `ours` after `steps` steps.

    rounding: changes that the baseline has measured, by point. global_batch: samples of a step.
    """
    arithmetic: Arithmetic = "bf16 against fp32"
    if ours == baseline:
        arithmetic = ours
    derived = gradient = _GRADIENT[arithmetic]
    measured = dict(rounding or {}) if arithmetic == "fp32" else {}
    if GRADIENT in measured:
        most = max(_LEAST_MISTAKE, 1 / (2 * global_batch))
        gradient = max(derived, min(_ROOM * measured[GRADIENT].tensor, most))
    return Tolerance(
        arithmetic=arithmetic,
        steps=steps,
        # the loss is the end of the forward half of the same computation
        loss=min(derived, _GRADIENT["bf16"]),
        gradient=gradient,
        rounding=measured,
    )
