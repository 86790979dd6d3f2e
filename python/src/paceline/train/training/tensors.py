"""Weights and gradients as files, checksums and norms; identity of their memory."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor


def sha256_of(tensors: Mapping[str, Tensor]) -> str:
    """Return a checksum over names, types, shapes and bytes in order, independent of the memory
    format."""
    digest = hashlib.sha256()
    for name, tensor in tensors.items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        digest.update(flat.numpy().data)
    return digest.hexdigest()


def sha256_by_name(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the checksum of each tensor."""
    return {name: sha256_of({"": tensor}) for name, tensor in tensors.items()}


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file, under its final name only when it is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.part")
    try:
        save_file(_separate(tensors), temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _separate(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return contiguous tensors; copy those that share memory with another, as tied weights do."""
    separate: dict[str, Tensor] = {}
    places: set[int] = set()
    for name, tensor in tensors.items():
        own = tensor.detach().contiguous()
        if own.data_ptr() in places and own.numel():
            own = own.clone()
        places.add(own.data_ptr())
        separate[name] = own
    return separate


def update_l2(final: Mapping[str, Tensor], initial: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the L2 norm of (final - initial) for each tensor."""
    return {
        name: float(torch.linalg.vector_norm((final[name] - initial[name]).detach().double()))
        for name in final
    }
