"""Tensors of a script's training that are compared with the baseline's.

Parameters have the names of their modules. Sharded parameters (DTensor) are gathered, collectively;
other parameters that differ between ranks cannot be compared.
"""

from __future__ import annotations

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from paceline.rank.script.modules import named_parameters
from paceline.records.layout import TrialFiles
from paceline.training.tensors import save_tensors, sha256_by_name, sha256_of, update_l2

Final = tuple[dict[str, str], dict[str, float]]


class ParameterRecord:
    """The parameters of an optimiser, from the first step to the end of the script.

    names: of each parameter, by its id. files: where the first rank keeps tensors; None keeps only
    checksums.
    """

    def __init__(
        self, optimizer: Optimizer, names: dict[int, list[str]], files: TrialFiles | None
    ) -> None:
        self._files = files
        self._parameters = named_parameters([optimizer], names)
        self._is_sharded = any(isinstance(p, DTensor) for p in self._parameters.values())
        # Without any, a comparison of first gradients would compare zeros.
        self.has_gradient = any(p.grad is not None for p in self._parameters.values())
        self.count = sum(p.numel() for p in self._parameters.values())
        self._final: Final | None = None
        weights = self._weights()
        self.initial_sha256 = sha256_of(weights)
        if files is not None:
            save_tensors(files.initial_weights, weights)
            save_tensors(files.gradient, self._gradients())
        elif self._is_sharded:
            self._gradients()  # to gather them is collective

    def keep_sharded(self) -> None:
        """Take the final weights now if they are sharded, while ranks can still gather them."""
        if self._is_sharded:
            self._final = self._take_final()

    def final(self) -> Final:
        """Return the checksum of each final tensor, and the L2 norm by which it has changed.

        The norms are empty without files. Collective for sharded parameters.
        """
        return self._final or self._take_final()

    def _take_final(self) -> Final:
        weights = self._weights()
        moved: dict[str, float] = {}
        if self._files is not None:
            save_tensors(self._files.weights, weights)
            moved = update_l2(weights, load_file(self._files.initial_weights))
            self._files.initial_weights.unlink()
        return sha256_by_name(weights), moved

    def _weights(self) -> dict[str, Tensor]:
        return {name: whole(p.detach()) for name, p in self._parameters.items()}

    def _gradients(self) -> dict[str, Tensor]:
        """Return the gradients; zeros for parameters that the loss does not depend on."""
        return {
            name: whole(p.grad if p.grad is not None else torch.zeros_like(p)).detach()
            for name, p in self._parameters.items()
        }


def whole(tensor: Tensor) -> Tensor:
    """Return a tensor as float32 on the CPU, gathered if it is sharded."""
    found: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    if found.layout != torch.strided:
        found = found.to_dense()
    return found.to("cpu", torch.float32)
