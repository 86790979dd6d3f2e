"""Linear layers that compute their weight gradient once a step instead of once a micro-batch.

With m micro-batches a backward pass adds m gradients to each weight: m passes over the whole
matrix, which costs more than the arithmetic for large fully connected layers. Here a micro-batch
computes only the gradient of its input, for which the previous stage waits. The operands of the
weight gradient are kept, and `flush` computes it as one product over all micro-batches. (Backward
pass in two parts: Qi et al.: Zero Bubble Pipeline Parallelism, ICLR 2024, arXiv:2401.10241.)
`flush` runs at the end, while an earlier stage still runs its last backward pass.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor, nn

from paceline.train.training.tensors import (
    bias_gradient,
    is_plain_linear,
    joined,
    linear_that_keeps,
    weight_gradient,
)

if TYPE_CHECKING:
    from paceline.train.strategies.reduction.factor_exchange import NodeFactors


class DeferredLinear(nn.Module):
    """An nn.Linear that computes its parameters' gradients in `flush`, not in the backward pass.

    A step is `begin`, any number of forward and backward passes, `flush`. `flush` adds to `.grad`,
    because other layers may share the parameters; so all layers begin before the first backward
    pass. Under autocast it computes in the lower precision, as nn.Linear does, and casts the
    weights once a step.
    """

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer
        self._cast: tuple[Tensor, Tensor | None] | None = None
        self._inputs: list[Tensor] = []
        self._outputs_gradients: list[Tensor] = []
        self._buffers_of_gradients: dict[str, Tensor] = {}
        self._name = ""
        self._nodes: NodeFactors | None = None

    def gather_over(self, nodes: NodeFactors, name: str) -> None:
        """Compute the gradients from the factors of all nodes from now on.

        name: of the layer in the model.
        """
        self._nodes, self._name = nodes, name

    def begin(self) -> None:
        """Discard the gradients and the state of the previous step."""
        self.layer.zero_grad()
        self._forget()

    def _forget(self) -> None:
        self._cast = None  # the weights may change
        self._inputs.clear()
        self._outputs_gradients.clear()

    def cast(self, device: str) -> None:
        """Cast the weights now if autocast requires it, instead of in the first pass of the
        step."""
        self._operands(device)

    def forward(self, inputs: Tensor) -> Tensor:
        """Compute the layer; `inputs` has shape (samples, ..., features)."""
        weight, bias = self._operands(inputs.device.type)
        return linear_that_keeps(inputs.to(weight.dtype), weight, bias, self._keep)

    def send(self) -> None:
        """Send the factors of all passes since `begin` to the other nodes, if they need them."""
        if self._nodes is None:
            return
        weight, _ = self._cast or _parameters(self.layer)
        # A node without samples takes part.
        inputs = joined(self._inputs or [weight.new_empty((0, self.layer.in_features))])
        gradients = joined(self._outputs_gradients or [weight.new_empty((0, len(weight)))])
        self._nodes.keep_inputs(self._name, inputs)
        self._nodes.keep_gradients(self._name, gradients)

    def flush(self) -> None:
        """Add the gradients of weight and bias: sums over all passes since `begin`, float32.

        Call `send` before.
        """
        weight, bias = _parameters(self.layer)
        if self._nodes is not None:
            inputs, gradients = self._nodes.wait(self._name)
            self._inputs, self._outputs_gradients = [inputs], [gradients]
        of_weight = self._gradient("weight", weight)
        of_bias = None if bias is None else self._gradient("bias", bias)
        if self._inputs:
            inputs, gradients = joined(self._inputs), joined(self._outputs_gradients)
            weight_gradient(inputs, gradients, of_weight)
            if of_bias is not None:
                bias_gradient(gradients, of_bias)
        _add(weight, of_weight)
        if bias is not None and of_bias is not None:
            _add(bias, of_bias)
        self._forget()

    def repeat(self, times: int) -> None:
        """Repeat the recorded passes `times` times, to measure `flush`."""
        self._inputs *= times
        self._outputs_gradients *= times

    def free_gradients(self) -> None:
        """Free the memory of the gradients, which the next `flush` would use again."""
        self._buffers_of_gradients.clear()

    def _gradient(self, name: str, parameter: Tensor) -> Tensor:
        """Return the memory of a gradient, reused in every step because new pages are expensive."""
        if name not in self._buffers_of_gradients:
            self._buffers_of_gradients[name] = torch.zeros_like(parameter)
        buffer = self._buffers_of_gradients[name]
        return buffer if self._inputs else buffer.zero_()

    def _keep(self, inputs: Tensor, outputs_gradient: Tensor) -> None:
        self._inputs.append(inputs)
        self._outputs_gradients.append(outputs_gradient)

    def _operands(self, device: str) -> tuple[Tensor, Tensor | None]:
        weight, bias = _parameters(self.layer)
        weight, bias = weight.detach(), None if bias is None else bias.detach()
        if not torch.is_autocast_enabled(device):
            return weight, bias
        if self._cast is None:
            dtype = torch.get_autocast_dtype(device)
            self._cast = weight.to(dtype), None if bias is None else bias.to(dtype)
        return self._cast


def _parameters(layer: nn.Linear) -> tuple[Tensor, Tensor | None]:
    return layer.weight, layer.bias


def _add(parameter: Tensor, gradient: Tensor) -> None:
    """Add to a parameter's gradient; without one, `gradient` becomes it."""
    parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)


def deferred(layer: nn.Module) -> nn.Module:
    """Return `layer`, or for an nn.Linear that is trained one that defers its weight gradient."""
    return DeferredLinear(layer) if is_deferred(layer) else layer


def is_deferred(layer: nn.Module) -> TypeGuard[nn.Linear]:
    """Return whether a pipeline defers the weight gradient of a layer."""
    return is_plain_linear(layer) and all(p.requires_grad for p in layer.parameters())
