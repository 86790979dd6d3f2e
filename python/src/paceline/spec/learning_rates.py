"""Learning rate of a training: scaled with the global batch, and increased during warm-up.

Every configuration of a workload has the same global batch, so it has the same rates, whatever its
number of ranks. Runs whose global batch grows with the ranks have rates that grow with them.
"""

from __future__ import annotations

from typing import Literal

LearningRateScaling = Literal["none", "linear", "sqrt"]
_EXPONENTS: dict[LearningRateScaling, float] = {"none": 0.0, "linear": 1.0, "sqrt": 0.5}
# Keys of [training] and [[workloads]] beside `learning_rate`.
LEARNING_RATE_KEYS = ("learning_rate_scaling", "reference_batch", "learning_rate_warmup_steps")


def scaled_learning_rate(
    learning_rate: float, scaling: LearningRateScaling, global_batch: int, reference_batch: int
) -> float:
    """Return the rate for a global batch.

    learning_rate: for `reference_batch` samples. Linear: in proportion to the batch (Goyal et al.,
    arXiv:1706.02677); sqrt: to its square root (Krizhevsky, arXiv:1404.5997).
    """
    factor: float = (global_batch / reference_batch) ** _EXPONENTS[scaling]
    return learning_rate * factor


def warmup_factor(step: int, warmup_steps: int) -> float:
    """Return the factor of the rate in `step` (from 0): it grows linearly to 1 in `warmup_steps`.

    Step s of a warm-up of n steps has the factor (s + 1) / n.
    """
    return min(1.0, (step + 1) / max(1, warmup_steps))
