"""The optimiser of a task with its learning-rate schedule, the same for every strategy."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn

from paceline.base.errors import UsageError
from paceline.measure.records.communication import StrategyResult
from paceline.plan.spec.values import warmup_factor
from paceline.plan.trials.trial import Training
from paceline.train.training.task import Task

_EPSILON = 1e-6  # as in torch.nn.utils.clip_grad_norm_
_WHOLE = 1e-6  # rounding of the sum of the shares of a batch


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that training changes, each under its first name in the model.

    Others have requires_grad=False.
    """
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def no_gradient(name: str) -> UsageError:
    """Return the error about a trained parameter that has no gradient after a backward pass."""
    return UsageError(
        f"parameter {name}: expected a gradient, got none; with several workers the loss must "
        "depend on every parameter in every step. Use it in the forward, remove it, or set "
        "requires_grad=False"
    )


class TaskOptimizer:
    """A task's optimiser of some parameters, and the schedule of its learning rate."""

    def __init__(
        self,
        task: Task,
        parameters: Iterable[tuple[str, nn.Parameter]],
        scale: LossScale | None = None,
    ) -> None:
        """parameters: with the names of the model; at least one. scale: of the gradients."""
        self._task = task
        self._scale = scale or LossScale(is_used=False)
        self._named = list(parameters)
        self._parameters = [parameter for _, parameter in self._named]
        self._clip_norm = task.clip_norm
        self._warmup_steps = task.settings.learning_rate_warmup_steps
        self.begin()

    def begin(self) -> None:
        """Begin without state, at the start of the schedule."""
        self.optimizer = self._task.optimizer(self._named)
        self._schedule = self._task.schedule(self.optimizer)
        self._steps = 0
        self._begun = 0.0  # part of a step that was made by updates with a part of the batch

    def step(self, squared_norm: float | None = None) -> None:
        """Step the optimiser with the parameters' `.grad`, then the schedule.

        squared_norm: of the gradient of the whole model, for clipping and under fp16; None if these
        parameters are the whole model. Under fp16 a gradient that is not finite changes nothing.
        """
        is_finite = True
        if self._clip_norm is not None or self._scale.is_used:
            norm = math.sqrt(self.squared_norm() if squared_norm is None else squared_norm)
            is_finite = not self._scale.is_used or math.isfinite(norm)
            factor = 1 / self._scale.value
            if self._clip_norm is not None:
                factor *= min(1.0, self._clip_norm / (norm + _EPSILON))
            if factor != 1:
                for gradient in self._gradients():
                    gradient.mul_(factor)
        if is_finite:
            self._step_with(1.0)
        self._end_step()

    def step_part(self, share: float, progress: float | None = None) -> None:
        """Step the optimiser with the mean gradient of a part of a batch, in `.grad`.

        share: samples of the part / samples of the batch. The learning rate is multiplied with it.
        So the parts of a batch move the weights together as far as one step does: also with weight
        decay, and with optimisers that normalise the gradient. The schedule steps once per batch.
        progress: batches that the training has advanced since the last call; None: `share`, if this
        optimiser gets all parts of a batch.
        """
        if share:
            self._step_with(share)
        self._begun += share if progress is None else progress
        while self._begun > 1 - _WHOLE:
            self._begun -= 1
            self._end_step()

    def _step_with(self, share: float) -> None:
        """Step with the warmed-up rates, multiplied by `share`; the schedule does not see it."""
        groups = self.optimizer.param_groups
        rates = [group["lr"] for group in groups]
        factor = share * warmup_factor(self._steps, self._warmup_steps)
        try:
            for group in groups:
                group["lr"] = group["lr"] * factor  # not in place: a rate may be a tensor
            self.optimizer.step()
        finally:
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate

    def _end_step(self) -> None:
        self._steps += 1
        if self._schedule is not None:
            self._schedule.step()

    def squared_norm(self) -> float:
        """Return the squared L2 norm of the gradients of these parameters, together."""
        norms = [torch.linalg.vector_norm(g, dtype=torch.float64) for g in self._gradients()]
        # all values at once, because a GPU is waited for
        squares = sum(norm**2 for norm in torch.stack(norms).tolist()) if norms else 0.0
        return float(squares) / self._scale.value**2

    @property
    def has_stepped(self) -> bool:
        return self._steps > 0 or self._begun > 0

    def parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return the parameters with their names."""
        return self._named

    def state(self) -> Iterator[tuple[str, nn.Parameter, str, Any]]:
        """Yield (name, parameter, key, value) of what the optimiser keeps for each parameter."""
        for name, parameter in self._named:
            for key, value in self.optimizer.state.get(parameter, {}).items():
                yield name, parameter, key, value

    def set_state(self, parameter: nn.Parameter, key: str, value: Any) -> None:
        """Set what the optimiser keeps for a parameter; in place if it has such a tensor."""
        own = self.optimizer.state[parameter]
        if not isinstance(value, torch.Tensor):
            own[key] = value
        elif isinstance(own.get(key), torch.Tensor) and own[key].shape == value.shape:
            own[key].copy_(value)
        else:
            # Counters stay on the CPU, where torch.optim has them unless it runs fused on a GPU.
            device = parameter.device if value.dim() or self._is_fused(parameter) else value.device
            own[key] = torch.empty_strided(
                value.shape, value.stride(), dtype=value.dtype, device=device
            ).copy_(value)

    def learning_rates(self) -> dict[str, float]:
        """Return the present learning rate of each parameter."""
        names = {id(parameter): name for name, parameter in self._named}
        return {
            names[id(parameter)]: float(group["lr"])
            for group in self.optimizer.param_groups
            for parameter in group["params"]
            if id(parameter) in names
        }

    def repeat_schedule(self, steps: int) -> None:
        """Step the schedule of an optimiser that has begun as in a training of `steps` steps."""
        self._steps = steps
        if self._schedule is None:
            return
        with warnings.catch_warnings():  # torch expects a step of the optimiser before each
            warnings.simplefilter("ignore", UserWarning)
            for _ in range(steps):
                self._schedule.step()

    def _is_fused(self, parameter: nn.Parameter) -> bool:
        groups = (
            g for g in self.optimizer.param_groups if any(p is parameter for p in g["params"])
        )
        return any(group.get("fused") or group.get("capturable") for group in groups)

    def _gradients(self) -> list[Tensor]:
        return [p.grad for p in self._parameters if p.grad is not None]


# --- scale of the loss under fp16, so that small gradients are not rounded to zero ---------------
#
# The smallest float16 is 6e-8, and many gradients of activations are smaller. So the loss is
# multiplied by a power of two, and the optimiser divides the gradients by it. A gradient that is
# not finite shows that the scale was too large: its step is left out, and the scale is halved
# (Micikevicius et al.: Mixed Precision Training, ICLR 2018). All ranks have equal scales, because
# they see equal norms.

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
