"""Batch normalisation over the global batch, wherever its samples are.

torch's layer normalises with the statistics of the samples that it sees, so a replica with half of
a batch computes something else than one with the whole. Here the statistics are summed over all
replicas in the forward pass, and their gradients in the backward pass (as in
torch.nn.SyncBatchNorm, which is for GPUs with one process each).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import batch_norm

from paceline.base.errors import UsageError
from paceline.base.torch_internals import BatchNormLayer
from paceline.collectives.recorder import PassCommunication, Total
from paceline.plan.spec.values import BatchNorm
from paceline.train.training.checkpointing import once

_EXCLUDED = "paceline_excluded"  # attribute of a layer whose samples do not count


def batch_norms(model: nn.Module) -> dict[str, BatchNormLayer]:
    """Return the layers with batch statistics, by name."""
    return {name: m for name, m in model.named_modules() if isinstance(m, BatchNormLayer)}


def statistics_width(model: nn.Module) -> int:
    """Return the elements of the longest vector that `synchronise` sums; 0 without such layers."""
    return max((2 * layer.num_features + 1 for layer in batch_norms(model).values()), default=0)


def synchronise(
    model: nn.Module,
    total: Total,
    statistics: BatchNorm,
    communication: PassCommunication | None = None,
) -> PassCommunication | None:
    """Make the layers of one of several replicas use the statistics of all replicas in training
    mode, or with statistics "per-replica" those of the samples of a pass.

    total: called in the same order by all replicas, twice for each layer in a step.
    communication: to which the time of these calls is added; a new one, if None.
    Return it; None if there are no calls.
    """
    if statistics != "global":
        normalise_alone(model)
        return None
    layers = batch_norms(model)
    communication = communication or PassCommunication()
    for layer in layers.values():
        # only `forward` is replaced: the module keeps its names, parameters and buffers
        layer.forward = partial(  # type: ignore[method-assign]
            _forward, layer, communication.timed(total)
        )
    return communication if layers else None


def normalise_alone(model: nn.Module) -> None:
    """Make the layers use the statistics of the samples of a pass in training mode.

    A step in which they cannot normalise raises UsageError.
    """
    for layer in batch_norms(model).values():
        layer.forward = partial(_forward_alone, layer)  # type: ignore[method-assign]


@contextmanager
def placeholders(model: nn.Module) -> Iterator[None]:
    """Pass forward with samples that do not count, to take part in the sums of other replicas."""
    layers = batch_norms(model).values()
    for layer in layers:
        setattr(layer, _EXCLUDED, True)
    try:
        yield
    finally:
        for layer in layers:
            setattr(layer, _EXCLUDED, False)


def _forward(layer: BatchNormLayer, total: Total, inputs: Tensor) -> Tensor:
    if not layer.training:
        return type(layer).forward(layer, inputs)
    excluded = getattr(layer, _EXCLUDED, False)
    mean, variance, count = once(lambda: _statistics(inputs.detach(), total, excluded=excluded))
    _track(layer, mean, variance, count)
    output: Tensor = _Normalise.apply(  # type: ignore[no-untyped-call]
        inputs, layer.weight, layer.bias, mean, variance, layer.eps, count, total, excluded
    )
    return output


def _forward_alone(layer: BatchNormLayer, inputs: Tensor) -> Tensor:
    """Normalise with the statistics of the inputs; samples that do not count change none."""
    if not layer.training or not getattr(layer, _EXCLUDED, False):
        if layer.training and inputs.numel() == inputs.shape[1]:
            raise UsageError(
                "batch_norm: a replica or micro-batch has one sample of this step, and a single "
                "value per channel cannot be normalised; use batches that leave each of them "
                'several samples, or batch_norm = "global"'
            )
        return type(layer).forward(layer, inputs)
    zeros = torch.zeros(inputs.shape[1], device=inputs.device)
    return batch_norm(inputs, zeros, zeros + 1, layer.weight, layer.bias, training=False)


def _statistics(inputs: Tensor, total: Total, *, excluded: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean and biased variance of each channel, float32, and the number of values, float64.

    All are on the device of the inputs, and nothing here waits for it.
    """
    channels = inputs.shape[1]
    if excluded:
        sums = torch.zeros(2 * channels + 1, dtype=torch.float64, device=inputs.device)
    else:
        # of float32, because the result has the type of the inputs
        moments = torch.batch_norm_update_stats(inputs.float(), None, None, 0)
        mean, variance = torch.stack(moments).double()
        means = torch.cat([mean, variance.addcmul_(mean, mean), mean.new_ones(1)])
        sums = means.mul_(inputs.numel() // channels)
    sums = total(sums)
    count = sums[-1]
    mean, mean_square = (sums[:-1] / count).view(2, channels)
    variance = mean_square.addcmul(mean, mean, value=-1).clamp_(min=0)
    return mean.float(), variance.float(), count


@torch.no_grad()
def _track(layer: BatchNormLayer, mean: Tensor, variance: Tensor, count: Tensor) -> None:
    """Update the running statistics as torch does."""
    if not layer.track_running_stats or layer.running_mean is None:
        return
    assert layer.running_var is not None
    assert layer.num_batches_tracked is not None
    layer.num_batches_tracked += 1
    momentum = layer.momentum
    if momentum is None:
        momentum = 1 / float(layer.num_batches_tracked)
    unbiased = variance * (count / (count - 1).clamp_(min=1))
    layer.running_mean.lerp_(mean, momentum)
    layer.running_var.lerp_(unbiased, momentum)


class _Normalise(torch.autograd.Function):
    """Normalise with given statistics; the gradient regards that they depend on the inputs.

    torch's own kernels do most of it, so it rounds as the layer of one process does. Single
    operations in place of them take two to eight times as long.
    """

    @staticmethod
    def forward(  # noqa: PLR0913, PLR0917  (as torch passes them)
        ctx: Any,
        inputs: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        variance: Tensor,
        epsilon: float,
        count: Tensor,
        total: Total,
        excluded: bool,
    ) -> Tensor:
        ctx.save_for_backward(inputs, weight, mean, variance, count)
        ctx.epsilon, ctx.total, ctx.excluded = epsilon, total, excluded
        return batch_norm(inputs, mean, variance, weight, bias, training=False, eps=epsilon)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight, mean, variance, count = ctx.saved_tensors
        gradient = gradients[0]
        own = _gradients_of_channels(gradient, inputs, weight, mean, variance, ctx.epsilon)
        if ctx.excluded:
            own.zero_()
        sums = (ctx.total(own.detach().double()) / count).float()
        mean_gradient, mean_product = sums.chunk(2)
        to_inputs = None
        if ctx.excluded:
            to_inputs = torch.zeros_like(inputs)
        elif ctx.needs_input_grad[0]:
            # scale x (gradient - its mean - normalised inputs x mean of their product)
            deviation = torch.rsqrt(variance + ctx.epsilon)
            scale = deviation if weight is None else deviation * weight
            shape = _shape(inputs)
            slope, shift = -scale * deviation * mean_product, -scale * mean_gradient
            # the mean first: it may be much larger than the deviation
            centred = inputs - mean.view(shape)
            to_inputs = torch.addcmul(shift.view(shape), centred, slope.view(shape))
            to_inputs = to_inputs.addcmul_(gradient, scale.view(shape)).to(inputs.dtype)
        to_weight = own[len(mean) :] if ctx.needs_input_grad[1] else None
        to_bias = own[: len(mean)] if ctx.needs_input_grad[2] else None
        return to_inputs, to_weight, to_bias, None, None, None, None, None, None


def _gradients_of_channels(
    gradient: Tensor,
    inputs: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    variance: Tensor,
    epsilon: float,
) -> Tensor:
    """Return the sums over a channel of the gradient, and of its product with the normalised
    inputs: the gradients of the bias and of the weight, shape (2 x channels,)."""
    if inputs.device.type == "cpu":
        _, of_weight, of_bias = torch.ops.aten.native_batch_norm_backward(
            gradient, inputs, weight, mean, variance, None, None, False, epsilon,
            [False, True, True],
        )  # fmt: skip
        return torch.cat([of_bias, of_weight])
    # On a GPU that kernel needs statistics that it saved itself; this one is of SyncBatchNorm.
    deviation = torch.rsqrt(variance + epsilon)
    of_bias, products, _, _ = torch.batch_norm_backward_reduce(
        *_of_one_format(gradient, inputs), mean, deviation, weight, True, False, False
    )
    return torch.cat([of_bias, products * deviation])


def _of_one_format(gradient: Tensor, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Return both dense and in the memory format of the inputs, as the kernels of a GPU expect."""
    channels_last = inputs.dim() == 4 and inputs.is_contiguous(memory_format=torch.channels_last)
    kept = torch.channels_last if channels_last else torch.contiguous_format
    return gradient.contiguous(memory_format=kept), inputs.contiguous(memory_format=kept)


def _shape(inputs: Tensor) -> list[int]:
    """Return the shape in which a vector of channels is broadcast to the inputs."""
    return [1, inputs.shape[1], *[1] * (inputs.dim() - 2)]
