"""Sufficient factors for a training script that uses torch's DistributedDataParallel itself."""

from __future__ import annotations

import weakref
from collections.abc import Collection
from contextlib import nullcontext
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from paceline.base.errors import UsageError
from paceline.base.torch_internals import call_after_backward, exclude_from_ddp
from paceline.train.strategies.reduction.factor_exchange import ReplicaFactors
from paceline.train.strategies.reduction.sufficient_factors import capture
from paceline.train.transports.bucket_settings import FactorSetting


def with_factors(
    model: DistributedDataParallel,
    example: Tensor,
    *,
    samples: int,
    setting: FactorSetting = "auto",
    dtype: torch.dtype = torch.float32,
    limit_s: float | None = None,
) -> DistributedDataParallel:
    """Return a DDP model that exchanges factors of linear layers where that is faster.

    Call it once after DDP, on all ranks, and train with the result; gradients are the same means
    over ranks, up to the order of sums. Collective: it measures link and processor for about a
    second. `result.sufficient_factors` holds the choice of each layer.

    model: on the CPU, in the default process group. example: an input of one sample. samples: the
    largest number of samples of a rank in an optimiser step; fewer are padded with zeros. setting:
    "always" and "never" replace the choice. dtype: in which factors are sent; torch.bfloat16 if the
    script trains under such an autocast. limit_s: limit of each wait for factors; None means
    torch's default. Raises UsageError for a model on GPUs or in another process group,
    EnvironmentLacks if "always" cannot give equal weights on all ranks.
    """
    _check(model)
    factors = _BackwardFactors(setting, samples)
    factors.join(model.module, example, samples, dtype, limit_s)
    if factors.layers:
        model = _ignoring(model, factors.parameter_names)
        factors.follow(model)
        # Only `model` owns the factors. In a reference cycle with the layers, the process group
        # would be freed when the interpreter ends, which Gloo does not survive.
        model.factor_exchange = factors  # type: ignore[assignment]
    model.sufficient_factors = factors.choice.describe()  # type: ignore[assignment]
    return model


class _BackwardFactors(ReplicaFactors):
    """Sends factors in a backward pass, and sets gradients at its end."""

    def __init__(self, setting: FactorSetting, samples: int) -> None:
        super().__init__(setting)
        self._model: DistributedDataParallel | weakref.CallableProxyType[DistributedDataParallel]
        self._samples = samples
        self._will_finish = False

    def follow(self, model: DistributedDataParallel) -> None:
        """Send the factors of passes through this model from now on."""
        self._model = weakref.proxy(model)
        capture(self._captured, partial(_keep, weakref.ref(self)))
        self.begin(self._samples)

    def keep(self, layer: str, inputs: Tensor, gradients: Tensor) -> None:
        """Send the factors of a layer; within `no_sync`, keep them for the next pass."""
        is_last = bool(self._model.require_backward_grad_sync)
        with nullcontext() if is_last else self.accumulating():
            self.keep_inputs(layer, inputs)
            self.keep_gradients(layer, gradients)
        if is_last and not self._will_finish:
            self._will_finish = True
            # Runs before DDP's own callback, so the products overlap the sums of its buckets.
            call_after_backward(self._finish)

    def _finish(self) -> None:
        self._will_finish = False
        scale = 1 / dist.get_world_size()  # DDP averages
        for name in reversed(self.layers):
            for parameter, gradient in self._products(name, *self.wait(name)):
                gradient.mul_(scale)
                if parameter.grad is None:
                    parameter.grad = gradient
                else:
                    parameter.grad.add_(gradient)
        self.begin(self._samples)


def _keep(
    factors: weakref.ref[_BackwardFactors], layer: str, inputs: Tensor, gradients: Tensor
) -> None:
    found = factors()
    if found is None:
        raise UsageError(
            f"layer {layer}: expected the model that paceline.with_factors returned, got none; "
            "keep it, and train with it"
        )
    found.keep(layer, inputs, gradients)


def _ignoring(
    model: DistributedDataParallel, parameters: Collection[str]
) -> DistributedDataParallel:
    """Return a DDP model of the same module and settings that ignores these parameters."""
    module = model.module
    exclude_from_ddp(module, list(parameters))
    if not any(p.requires_grad for name, p in module.named_parameters() if name not in parameters):
        raise UsageError(
            "paceline.with_factors: expected a model with a trained layer whose gradient is "
            'summed, got linear layers only; add one to setting = "never", or use plain DDP'
        )
    return DistributedDataParallel(
        module,
        forward_sync_buffers=model.forward_sync_buffers,
        bucket_cap_mb=model.bucket_bytes_cap / 2**20,
        find_unused_parameters=model.find_unused_parameters,
        gradient_as_bucket_view=model.gradient_as_bucket_view,
        static_graph=model.static_graph,
    )


def _check(model: DistributedDataParallel) -> None:
    if not isinstance(model, DistributedDataParallel):
        raise UsageError(
            "paceline.with_factors: expected a DistributedDataParallel, got "
            f"{type(model).__name__}; wrap the model first"
        )
    if model.process_group is not dist.group.WORLD:
        raise UsageError(
            "paceline.with_factors: expected a model in the default process group, got another "
            "group; use plain DDP there"
        )
    devices = {parameter.device.type for parameter in model.parameters()}
    if devices != {"cpu"}:
        raise UsageError(
            "paceline.with_factors: expected a model on the CPU, got "
            f"{', '.join(sorted(devices))}; use plain DDP on GPUs"
        )
