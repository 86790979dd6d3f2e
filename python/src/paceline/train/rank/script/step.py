"""`paceline.step`: what a training script may report about its steps.

The module imports nothing, because `import paceline` imports it, in every process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class Receiver(Protocol):
    """Receives the reports of the script that runs in this process."""

    def reported(self, loss: float | Tensor | None, samples: int | None) -> None: ...


_receiver: Receiver | None = None


def step(*, loss: float | Tensor | None = None, samples: int | None = None) -> None:
    """Report the loss and the number of samples of the training step that this rank has just done.

    loss: mean over these samples; a tensor is read later, so that a GPU need not be waited for.
    samples: of this rank. Call it once for each step, after `optimizer.step()`. Outside of Paceline
    it does nothing. Raises ValueError for a negative number of samples.
    """
    if _receiver is None:
        return
    if samples is not None and samples < 0:
        raise ValueError(f"paceline.step: expected samples >= 0, got {samples}")
    _receiver.reported(loss, samples)


def report_to(receiver: Receiver | None) -> None:
    """Pass all further reports to `receiver`; None ignores them."""
    global _receiver  # noqa: PLW0603  (the script has no other way to find its receiver)
    _receiver = receiver
