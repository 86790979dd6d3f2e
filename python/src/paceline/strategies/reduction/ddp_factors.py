"""Sufficient factors for a training script that uses torch's DistributedDataParallel itself."""

from __future__ import annotations

import weakref
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from paceline.errors import UsageError
from paceline.strategies.reduction.factor_layers import FactorLayers
from paceline.torch_internals import call_after_backward, exclude_from_ddp

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.records.communication import FactorResult
    from paceline.strategies.reduction.factor_exchange import FactorExchange
    from paceline.transports.bucket_settings import FactorSetting


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
    module: nn.Module = model.module
    layers = FactorLayers(module, example)
    choice, exchange = layers.join(setting, samples, dtype, limit_s)
    if exchange is None:
        return _with_choice(model, choice.describe())
    wrapped = _ignoring(model, layers.parameter_names(choice.chosen))
    backward = _BackwardPass(wrapped, choice.chosen, layers, exchange, samples)
    # Only `wrapped` owns the exchange. In a reference cycle with the layers, the process group
    # would be freed when the interpreter ends, which Gloo does not survive.
    wrapped.factor_exchange = backward  # type: ignore[assignment]
    layers.capture(choice.chosen, partial(_keep, weakref.ref(backward)))
    return _with_choice(wrapped, choice.describe())


class _BackwardPass:
    """Sends factors in a backward pass, and sets gradients at its end."""

    def __init__(
        self,
        model: DistributedDataParallel,
        names: Sequence[str],
        layers: FactorLayers,
        exchange: FactorExchange,
        samples: int,
    ) -> None:
        self._model = weakref.proxy(model)
        self._names = names
        self._layers = layers
        self._exchange = exchange
        self._samples = samples
        self._will_finish = False
        exchange.begin(samples)

    def keep(self, layer: str, inputs: Tensor, gradients: Tensor) -> None:
        """Send the factors of a layer; within `no_sync`, keep them for the next pass."""
        is_last = bool(self._model.require_backward_grad_sync)
        self._exchange.keep_inputs(layer, inputs, is_last=is_last)
        self._exchange.keep_gradients(layer, gradients, is_last=is_last)
        if is_last and not self._will_finish:
            self._will_finish = True
            # Runs before DDP's own callback, so the products overlap the sums of its buckets.
            call_after_backward(self._finish)

    def _finish(self) -> None:
        self._will_finish = False
        scale = 1 / dist.get_world_size()  # DDP averages
        for name in reversed(self._names):
            factors = self._exchange.wait(name)
            for parameter, gradient in self._layers.gradients(name, *factors):
                gradient.mul_(scale)
                if parameter.grad is None:
                    parameter.grad = gradient
                else:
                    parameter.grad.add_(gradient)
        self._exchange.begin(self._samples)


def _keep(
    backward: weakref.ref[_BackwardPass], layer: str, inputs: Tensor, gradients: Tensor
) -> None:
    found = backward()
    if found is None:
        raise UsageError(
            f"layer {layer}: expected the model that paceline.with_factors returned, got none; "
            "keep it, and train with it"
        )
    found.keep(layer, inputs, gradients)


def _ignoring(model: DistributedDataParallel, parameters: list[str]) -> DistributedDataParallel:
    """Return a DDP model of the same module and settings that ignores these parameters."""
    module = model.module
    exclude_from_ddp(module, parameters)
    ignored = set(parameters)
    if not any(p.requires_grad for name, p in module.named_parameters() if name not in ignored):
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


def _with_choice(
    model: DistributedDataParallel, described: FactorResult
) -> DistributedDataParallel:
    model.sufficient_factors = described  # type: ignore[assignment]
    return model
