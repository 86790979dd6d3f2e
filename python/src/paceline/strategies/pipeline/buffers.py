"""Buffers of a model whose stages are in different processes, for example running statistics."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from paceline.strategies.reduction.flat_layout import whole_lines
from paceline.training.state import persistent_buffers

if TYPE_CHECKING:
    from torch import Tensor, nn

    from paceline.node.shared_node import SharedNode
    from paceline.strategies.pipeline.split_points import Layers


class SharedBuffers:
    """The persistent buffers of a model, published by the stages that update them.

    own: those of this worker's stage, by name.
    """

    def __init__(self, shared: SharedNode, model: nn.Module, stage: Layers) -> None:
        """stage: the layers of this worker. Collective over the node."""
        buffers = persistent_buffers(model)
        sizes = {name: whole_lines(b.numel() * b.element_size()) for name, b in buffers.items()}
        memory = torch.from_numpy(shared.memory("buffers", max(1, sum(sizes.values()))))
        self._shared: dict[str, Tensor] = {}
        start = 0
        for name, buffer in buffers.items():
            part = memory[start : start + buffer.numel() * buffer.element_size()]
            self._shared[name] = part.view(buffer.dtype).view(buffer.shape)
            start += sizes[name]
        names = {id(buffer): name for name, buffer in buffers.items()}
        self.own = {
            names[id(buffer)]: buffer
            for _, layer in stage
            for buffer in layer.buffers()
            if id(buffer) in names
        }

    def publish(self) -> None:
        """Copy the buffers of this stage into the shared memory."""
        for name, buffer in self.own.items():
            self._shared[name].copy_(buffer)

    def all(self) -> dict[str, Tensor]:
        """Return the published buffers of all stages by name."""
        return self._shared
