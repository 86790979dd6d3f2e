"""Local SGD: every rank steps with its own gradient, and weights are averaged every few steps.

    the first `start_step` steps: gradients of all ranks are summed, as in all other strategies
    then, each rank: steps with the gradient of the mean loss over its own samples
    after every `period` such steps, and after the last step of the training: weights are averaged

McMahan et al. (AISTATS 2017) and Stich (Local SGD Converges Fast and Communicates Little, ICLR
2019). A start with averaged gradients is post-local SGD (Lin et al.: Don't Use Large Mini-Batches,
Use Local SGD, ICLR 2020). As in PyTorch's PostLocalSGDOptimizer, momentum is local to each rank,
the learning rate is unchanged, and all ranks' weights have the same coefficient, whatever their
number of samples.

PyTorch's PeriodicModelAverager averages after the first local step of each period and copies all
parameters into flat buffers for it. Here the parameters are in one array, which is averaged in
place after the last local step, so that a training ends with an averaging.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from paceline.measure.records.communication import StrategyResult
from paceline.plan.costs import all_reduce_bytes
from paceline.plan.trials.trial import RankContext, Trial
from paceline.train.strategies.descriptors import ProcessesOptions
from paceline.train.strategies.reduction.flat_layout import FlatReplica
from paceline.train.strategies.reduction.replicate_group import all_reduce_tensors
from paceline.train.training.devices import (
    CPU,
    InputMover,
    Stopwatch,
    device_of,
    move_model,
    on_cpu,
    synchronize,
    use_device,
)
from paceline.train.training.optimizers import TaskOptimizer
from paceline.train.training.passes import run_passes
from paceline.train.training.state import RankState, SavedState, restore_model, restore_optimizer
from paceline.train.training.strategy import (
    GradientResult,
    LocalStrategy,
    RankGroups,
    StepCommunication,
    Stepper,
    TrainBatch,
)
from paceline.train.training.task import Task

_NO_GRADIENT = GradientResult(
    loss_sum=0.0, forward_s=0.0, backward_s=0.0, comm_s=None, comm_ready_unix_s=None
)


class LocalReplica(FlatReplica, Stepper):
    """A model and its optimiser, whose momentum lies in one flat array like the weights.

    Its parameters are views of `weights`, their momentum of `momentum`, so that they can be sent as
    they are and replaced in place. A step uses the gradient of the mean loss over the replica's
    *own* samples. If weights are averaged after one such step from the same state, with the numbers
    of samples as averaging coefficients, the result is exactly a step with the gradient of the
    global mean, momentum included, because SGD is linear in the gradient.

    momentum: None if the training has none. It is zero before the first step. settings: device
    settings, for the records.
    """

    def __init__(
        self, task: Task, model: nn.Module, trial: Trial, device: torch.device = CPU
    ) -> None:
        """model: in its memory format; it is moved to `device`."""
        self.settings: StrategyResult = use_device(device, trial.training)
        move_model(model, device)
        super().__init__(model, partial(torch.zeros, device=device))
        self.momentum: Tensor | None = None
        self._groups: list[dict[str, Any]] = []  # of parameters with momentum
        self._task, self._training = task, trial.training
        self._device = device
        self._mover, self._stopwatch = InputMover(device), Stopwatch(device)
        self._has_gradient = False
        self._optimizer = TaskOptimizer(task, self.parameters.items())
        optimizer = self._optimizer.optimizer
        if not isinstance(optimizer, torch.optim.SGD):
            return
        self._groups = [group for group in optimizer.param_groups if group["momentum"]]
        if not self._groups:
            return
        self.momentum = torch.zeros_like(self.weights)
        names = {id(parameter): name for name, parameter in self.parameters.items()}
        for parameter in itertools.chain(*(group["params"] for group in self._groups)):
            buffer = self.layout.view(self.momentum, names[id(parameter)])
            optimizer.state[parameter]["momentum_buffer"] = buffer

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
        if not self._has_gradient:
            return
        dampenings = [group["dampening"] for group in self._groups]
        # The first update of SGD is not dampened; it knows it by a missing buffer.
        if any(dampenings) and self.momentum is not None and not self.momentum.any():
            for group in self._groups:
                group["dampening"] = 0
        self._optimizer.step()
        for group, dampening in zip(self._groups, dampenings, strict=True):
            group["dampening"] = dampening
        synchronize(self._device)

    def add_to(self, state: RankState, replica: int) -> None:
        """Add the optimiser's state of this replica, and of the first one the weights."""
        if replica == 0:
            state.add_model(self.model)
        state.add_optimizer(self._optimizer, prefix=f"replica/{replica}/")

    def restore(self, saved: SavedState) -> None:
        """Continue from a saved state, in the arrays `weights` and `momentum`."""
        restore_model(self.model, saved)
        restore_optimizer(self._optimizer, saved)


class LocalSgdStrategy(LocalStrategy):
    """One replica per rank, synchronised with the others only every few steps."""

    has_replica_state = True

    def __init__(self) -> None:
        self._steps = 0  # number of steps that have begun
        self._restored_steps = 0
        self._is_last = False
        self._sent_bytes = 0.0

    def prepare(
        self,
        task: Task,
        model: nn.Module,
        context: RankContext,
        trial: Trial,
        peers: RankGroups,  # noqa: ARG002  (torch's default group has all ranks)
    ) -> None:
        averaging = trial.options_as(ProcessesOptions).averaging
        assert averaging is not None, "only local SGD uses this implementation"
        self._settings = averaging
        self._rank, self._ranks = context.rank, context.world_size
        self._device = device_of(trial, context)
        self._replica = LocalReplica(task, model, trial, self._device)

    def gradient(self, batch: TrainBatch) -> GradientResult:
        """Compute the gradient.

        comm_s is 0 in a local step; `step` returns the cost of averaging weights.
        """
        self._steps += 1
        self._is_last = batch.is_last
        if self._ranks == 1:
            return self._replica.gradient(batch)
        if self._is_local:
            return replace(self._replica.gradient(batch), comm_s=0.0)
        computed = self._replica.gradient(batch, mean_over=batch.global_samples)
        started_s, ready_unix_s = time.perf_counter(), time.time()
        self._all_reduce(list(self._replica.gradients().values()))
        return replace(
            computed, comm_s=time.perf_counter() - started_s, comm_ready_unix_s=ready_unix_s
        )

    def step(self) -> StepCommunication | None:
        """Step the optimiser, and average the weights if an averaging is due."""
        self._replica.step()
        if self._ranks == 1 or not self._is_due:
            return None
        started_s, ready_unix_s = time.perf_counter(), time.time()
        weights = self._replica.weights
        self._all_reduce([weights])
        weights /= self._ranks
        synchronize(self._device)
        return StepCommunication(
            comm_s=time.perf_counter() - started_s, comm_ready_unix_s=ready_unix_s
        )

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients; in a local step, this rank's own."""
        return on_cpu(self._replica.gradients())

    def state_dict(self) -> dict[str, Tensor]:
        """Return the weights; they are equal on all ranks after an averaging."""
        return on_cpu(self._replica.state_dict())

    def weights_to_evaluate(self) -> dict[str, Tensor]:
        """Return the mean of all ranks' weights, also between two averagings."""
        if self._ranks == 1:
            return self.state_dict()
        mean = self._replica.weights.clone()
        all_reduce_tensors([mean])
        mean /= self._ranks
        return on_cpu(self._replica.state_dict(mean))

    def rank_state(self) -> RankState | None:
        """Return the weights on rank 0 and each rank's own optimiser state, after an averaging;
        None while the weights of the ranks differ."""
        if self._ranks > 1 and self._is_local and not self._is_due:
            return None
        state = RankState()
        self._replica.add_to(state, self._rank)
        return state

    def restore(self, saved: SavedState) -> None:
        """Continue; with another number of ranks, each gets the mean of the optimisers' states."""
        self._steps = self._restored_steps = saved.steps
        self._replica.restore(saved.of_replica(self._rank, self._ranks))

    def describe(self) -> StrategyResult:
        """Return settings and traffic. Bytes are means over all steps; uncompressed bytes are those
        of averaging gradients in every step."""
        steps = self._steps - self._restored_steps
        if self._ranks == 1 or not steps:
            return self._replica.settings
        parameters = 4 * sum(p.numel() for p in self._replica.parameters.values())
        return {
            **self._replica.settings,
            "averaging": {
                "period": self._settings.period_steps,
                "start_step": self._settings.start_step,
                "momentum": "local",
            },
            "sent_bytes_per_step": round(self._sent_bytes / steps),
            "uncompressed_bytes_per_step": round(all_reduce_bytes(parameters, self._ranks)),
        }

    @property
    def _local_steps(self) -> int:
        """Number of local steps that have begun, including the current one."""
        return self._steps - self._settings.start_step

    @property
    def _is_local(self) -> bool:
        return self._local_steps > 0

    @property
    def _is_due(self) -> bool:
        return self._is_local and (
            self._is_last or self._local_steps % self._settings.period_steps == 0
        )

    def _all_reduce(self, tensors: list[Tensor]) -> None:
        """Sum the tensors in place over all ranks."""
        all_reduce_tensors(tensors)
        self._sent_bytes += sum(all_reduce_bytes(t.nbytes, self._ranks) for t in tensors)
        synchronize(self._device)
