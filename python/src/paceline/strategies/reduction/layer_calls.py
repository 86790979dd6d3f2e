"""The calls of a model's layers in one forward pass, found without computing anything."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from paceline.training.fake_tensors import as_fake, call_fake, fake_mode_of
from paceline.training.modes import evaluating

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor, nn


def input_shapes(
    model: nn.Module, layers: Mapping[str, nn.Module], example: Tensor
) -> dict[str, list[torch.Size]]:
    """Return for each layer the shapes of its inputs in a forward pass of `example`.

    A model that fake tensors cannot pass gets no calls.
    """
    calls: dict[str, list[torch.Size]] = {name: [] for name in layers}
    hooks = [
        layer.register_forward_pre_hook(
            lambda _module, inputs, name=name: calls[name].append(inputs[0].shape)
        )
        for name, layer in layers.items()
    ]
    try:
        mode = fake_mode_of([model])
        with evaluating(model), torch.no_grad():
            call_fake(mode, model, as_fake(mode, example))
    except Exception:  # noqa: BLE001  (any model of a user; sums are always right)
        return {name: [] for name in layers}
    finally:
        for hook in hooks:
            hook.remove()
    return calls
