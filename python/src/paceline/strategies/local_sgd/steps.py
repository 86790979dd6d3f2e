"""One replica that steps by itself between two averagings of weights (local SGD).

The weights, and the momentum of the optimiser, each lie in one flat array, so that they can be sent
as they are and replaced in place. A step uses the gradient of the mean loss over the replica's
*own* samples.

If weights are averaged after one such step from the same state, with the numbers of samples as
averaging coefficients, the result is exactly a step with the gradient of the global mean, momentum
included, because SGD is linear in the gradient.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from paceline.strategies.reduction.flat_layout import FlatLayout
from paceline.training.batch_norm import normalise_alone
from paceline.training.devices import CPU, InputMover, Stopwatch, on_cpu, synchronize, use_device
from paceline.training.optimizers import TaskOptimizer, trained_parameters
from paceline.training.passes import run_passes
from paceline.training.state import restore_model, restore_optimizer
from paceline.training.strategy import GradientResult, Stepper

if TYPE_CHECKING:
    from paceline.plan.trial import Trial
    from paceline.records.communication import StrategyResult
    from paceline.training.state import RankState, SavedState
    from paceline.training.strategy import TrainBatch
    from paceline.training.task import Task

_NO_GRADIENT = GradientResult(
    loss_sum=0.0, forward_s=0.0, backward_s=0.0, comm_s=None, comm_ready_unix_s=None
)


class LocalReplica(Stepper):
    """A model and its optimiser; its parameters are views of `weights`, their momentum of
    `momentum`.

    weights: shape (elements,), float32, every parameter in storage order from a multiple of 64
    bytes, zeros between. Changing it changes the model. momentum: the same shape; None if the
    training has none. It is zero before the first step. settings: device settings, for the records.
    Running statistics of batch normalisation are those of this replica, and lie elsewhere.
    """

    def __init__(
        self, task: Task, model: nn.Module, trial: Trial, device: torch.device = CPU
    ) -> None:
        """model: in its memory format; it is moved to `device`."""
        self.settings: StrategyResult = use_device(device)
        self.model = model.to(device)
        normalise_alone(self.model)
        self.weights: Tensor
        self.momentum: Tensor | None = None
        self._task, self._training = task, trial.training
        self._device = device
        self._mover, self._stopwatch = InputMover(device), Stopwatch(device)
        self._has_gradient = False
        self._adopt_state()

    def gradient(self, batch: TrainBatch, mean_over: int | None = None) -> GradientResult:
        """Run forward and backward pass of this replica's samples.

        mean_over: divisor of the sum of their losses. None means their own number; a replica
        without samples then has no gradient, and `step` does nothing.
        """
        divisor = len(batch.sample_ids) if mean_over is None else mean_over
        self.model.zero_grad()
        self._has_gradient = divisor > 0
        if not self._has_gradient:
            return _NO_GRADIENT
        batch = replace(batch, global_samples=divisor)
        passed = run_passes(
            self._task,
            self.model,
            batch,
            self._training,
            stopwatch=self._stopwatch,
            mover=self._mover,
        )
        return passed.result(alone=True)

    def step(self) -> None:
        """Step the optimiser with the current gradient, if there is one."""
        if self._has_gradient:
            self._optimizer.step()
            synchronize(self._device)

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients by the model's own names, between `gradient` and `step`."""
        named = self.model.named_parameters()
        return on_cpu({name: p.grad for name, p in named if p.grad is not None})

    def state_dict(self) -> dict[str, Tensor]:
        """Return the weights by the model's own names, in CPU memory."""
        return on_cpu(self.model.state_dict())

    def add_to(self, state: RankState, replica: int) -> None:
        """Add the optimiser's state of this replica, and of the first one the weights."""
        if replica == 0:
            state.add_model(self.model)
        state.add_optimizer(self._optimizer, prefix=f"replica/{replica}/")

    def restore(self, saved: SavedState) -> None:
        """Continue from a saved state, in the arrays `weights` and `momentum`."""
        restore_model(self.model, saved)
        restore_optimizer(self._optimizer, saved)

    def _adopt_state(self) -> None:
        """Move the parameters into one array, and create the optimiser's momentum in another."""
        parameters = trained_parameters(self.model)
        layout = FlatLayout.of(parameters.items())
        self.weights = torch.zeros(layout.elements, device=self._device)
        layout.bind(parameters, self.weights, copy=True)
        self._optimizer = TaskOptimizer(self._task, parameters.items())
        optimizer = self._optimizer.optimizer
        if not isinstance(optimizer, torch.optim.SGD) or not optimizer.defaults["momentum"]:
            return
        self.momentum = torch.zeros_like(self.weights)
        for name, parameter in parameters.items():
            # SGD's first update is then momentum x 0 + gradient, as without this buffer.
            buffer = layout.view(self.momentum, name)
            optimizer.state[parameter]["momentum_buffer"] = buffer
