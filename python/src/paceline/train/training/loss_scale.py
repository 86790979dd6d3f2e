"""Scale of the loss under fp16, so that small gradients are not rounded to zero.

The smallest float16 is 6e-8, and many gradients of activations are smaller. So the loss is
multiplied by a power of two, and the optimiser divides the gradients by it. A gradient that is not
finite shows that the scale was too large: its step is left out, and the scale is halved
(Micikevicius et al.: Mixed Precision Training, ICLR 2018). All ranks have equal scales, because
they see equal norms.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

from paceline.measure.records.communication import StrategyResult
from paceline.plan.trials.trial import Training

if TYPE_CHECKING:
    from torch import Tensor

LOSS_SCALE = "loss_scale"  # name of its state in a checkpoint
# Those of torch.amp.GradScaler.
_FIRST, _GROWTH_STEPS = 2.0**16, 2000


class LossScale:
    """The scale of one rank's loss; in a training that needs none it is always 1."""

    def __init__(self, *, is_used: bool = True) -> None:
        self.is_used = is_used
        self.value = _FIRST if is_used else 1.0
        self._skipped_steps = 0
        self._finite_steps = 0  # since the last change

    @classmethod
    def of(cls, training: Training) -> Self:
        return cls(is_used=training.precision == "fp16")

    def update(self, squared_norm: float | None) -> None:
        """Adapt the scale after a step.

        squared_norm: of the gradient of the whole model; known wherever the scale is used.
        """
        if squared_norm is None or not self.is_used:
            return
        if not math.isfinite(squared_norm):
            self.value /= 2
            self._skipped_steps += 1
            self._finite_steps = 0
            return
        self._finite_steps += 1
        if self._finite_steps == _GROWTH_STEPS:
            self.value *= 2
            self._finite_steps = 0

    @property
    def state(self) -> dict[str, list[float]]:
        """The values that a checkpoint keeps, by name."""
        return {LOSS_SCALE: [self.value, self._finite_steps]} if self.is_used else {}

    def restore(self, state: Any) -> None:
        """Continue with a saved state. None: keep the own one, the saved training had none."""
        if state is not None and self.is_used:
            self.value, self._finite_steps = float(state[0]), int(state[1])

    def describe(self) -> StrategyResult:
        """Return the scale and the number of steps left out, for the records."""
        if not self.is_used:
            return {}
        return {"loss_scale": self.value, "skipped_steps": self._skipped_steps}

    def unscaled(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return gradients by name without the scale; copies, if it is used."""
        if not self.is_used:
            return dict(gradients)
        return {name: gradient / self.value for name, gradient in gradients.items()}
