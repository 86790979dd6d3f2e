"""The first weights of a model, once on a node instead of once for each of its ranks."""

from __future__ import annotations

import hashlib
import math
import mmap
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from paceline.host.memory import available_bytes
from paceline.node.memory import NodeShare, SharedFile, open_shared_file
from paceline.spec.values import MemoryFormat
from paceline.training.resources import return_freed_memory
from paceline.training.task import Task
from paceline.training.transforms import put_in_memory_format
from paceline.workloads.build import build_model, built_without_values

_LINE_BYTES = 64  # as torch aligns its tensors
_NOT_SHARED = "not shared"


class NodeModel:
    """Builds a task's model on all ranks of a node, with one copy of its first weights.

    The first rank of the node builds the model and moves its parameters into shared memory. The
    others build it on the meta device: their parameters are views of that memory, and their
    buffers copies of the first rank's. A rank that cannot build it so builds the whole model.
    """

    def __init__(
        self, task: Task, memory_format: MemoryFormat, node: NodeShare, limit_s: float
    ) -> None:
        """Build the first model; collective over the ranks of the node, which are several.

        node: used for nothing else. limit_s: of each wait for another rank; the first one needs
        the time of a build. Raises TimedOut.
        """
        self._task, self._memory_format = task, memory_format
        self._first: nn.Module | None = None  # model of the first rank, until it is fetched
        self._memory: _Memory | None = None  # None if a rank cannot share it
        self._places = ""  # of the tensors in it
        if node.local_rank == 0:
            self._first = self._whole()
            self._share(self._first, node, limit_s)
        else:
            self._attach(node, limit_s)

    def build(self) -> nn.Module:
        """Return a new model with the first weights. Its parameters must not be changed in place
        before they have other memory."""
        model, self._first = self._first, None
        if model is None:
            model = self._view()
        return self._whole() if model is None else model

    def release(self) -> None:
        """Free the memory of trained parameters, which no rank uses any more."""
        if self._memory is not None:
            self._memory.free_trained()
            self._memory = None

    def _share(self, model: nn.Module, node: NodeShare, limit_s: float) -> None:
        """Move the parameters into shared memory, and copy the buffers there."""
        tensors = _tensors(model)
        places = _Places.of(tensors)
        if places is None or places.size > available_bytes():
            node.publish("places", _NOT_SHARED)
            return
        node.publish("places", places.text)
        file = open_shared_file(node, limit_s)
        if file is None:
            return
        self._memory = memory = _Memory(places.trained_bytes, places.other_bytes, file)
        for name, tensor in tensors.items():
            view = memory.view(places.by_name[name])
            view.copy_(tensor.detach())
            if isinstance(tensor, nn.Parameter):
                tensor.data = view
        return_freed_memory()  # the strategy allocates its own weights next
        self._places = places.text
        node.publish("written", "")

    def _attach(self, node: NodeShare, limit_s: float) -> None:
        """Open the memory of the first rank."""
        published = node.lookup("places", limit_s)
        file = None if published == _NOT_SHARED else open_shared_file(node, limit_s)
        if file is None:
            return
        node.lookup("written", limit_s)
        trained_bytes, other_bytes, _ = published.split()
        self._memory = _Memory(int(trained_bytes), int(other_bytes), file)
        self._places = published

    def _view(self) -> nn.Module | None:
        """Return a model whose parameters are views of the shared memory."""
        model = None if self._memory is None else built_without_values(self._task)
        if model is None or self._memory is None:
            return None
        put_in_memory_format(model, self._memory_format)
        tensors = _tensors(model)
        places = _Places.of(tensors)
        if places is None or places.text != self._places:
            return None
        for name, tensor in tensors.items():
            view = self._memory.view(places.by_name[name])
            if isinstance(tensor, nn.Parameter):
                found: Tensor = nn.Parameter(view, requires_grad=tensor.requires_grad)
            else:
                found = view.clone()
            vars(found).update(vars(tensor))  # what the model has noted at it
            # All that uses the tensor, also under other names, uses the new memory.
            torch.utils.swap_tensors(tensor, found)  # type: ignore[no-untyped-call]
        return model

    def _whole(self) -> nn.Module:
        model = build_model(self._task)
        put_in_memory_format(model, self._memory_format)
        return model


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers, each under its first name."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


@dataclass(frozen=True, slots=True)
class _Place:
    """A tensor of the model, and its place in one of two parts of the memory."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # without gaps
    is_trained: bool  # in the part of trained parameters
    offset: int  # bytes

    @property
    def size(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class _Places:
    """Places of a model's tensors by name."""

    by_name: dict[str, _Place]
    trained_bytes: int
    other_bytes: int

    @classmethod
    def of(cls, tensors: dict[str, Tensor]) -> _Places | None:
        """Return None if one of the tensors is not an array of numbers."""
        found: dict[str, _Place] = {}
        sizes = {True: 0, False: 0}
        for name, tensor in tensors.items():
            if type(tensor) not in {Tensor, nn.Parameter} or not _is_plain(tensor):
                return None
            is_trained = tensor.requires_grad
            place = _Place(
                tensor.dtype, tuple(tensor.shape), _strides(tensor), is_trained, sizes[is_trained]
            )
            sizes[is_trained] += -(-place.size // _LINE_BYTES) * _LINE_BYTES
            found[name] = place
        return cls(found, sizes[True], sizes[False])

    @property
    def size(self) -> int:
        return self.trained_bytes + self.other_bytes

    @property
    def text(self) -> str:
        """Return both sizes, and a checksum that is equal for models with equal tensors."""
        checksum = hashlib.sha256(repr(self.by_name).encode()).hexdigest()
        return f"{self.trained_bytes} {self.other_bytes} {checksum}"


def _is_plain(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_quantized


def _strides(tensor: Tensor) -> tuple[int, ...]:
    """Return the strides of a tensor, or those of a contiguous one if it is not dense."""
    reach = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    if reach == tensor.numel():
        return tensor.stride()
    return torch.empty(tensor.shape, device="meta").stride()


class _Memory:
    """Shared memory with the tensors of a model; it consumes the file."""

    def __init__(self, trained_bytes: int, other_bytes: int, file: SharedFile) -> None:
        self._trained = file.map(max(1, trained_bytes))  # nothing of size 0 can be mapped
        others = file.map(max(1, other_bytes))
        file.close()
        self._bytes = {
            True: torch.frombuffer(self._trained, dtype=torch.uint8),
            False: torch.frombuffer(others, dtype=torch.uint8),
        }

    def view(self, place: _Place) -> Tensor:
        """Return a tensor in the memory."""
        stored = self._bytes[place.is_trained][place.offset : place.offset + place.size]
        return stored.view(place.dtype).as_strided(place.shape, place.strides)

    def free_trained(self) -> None:
        """Free the pages of trained parameters on all ranks; frozen ones stay shared."""
        with suppress(OSError):  # then they are freed when the last rank has no views
            self._trained.madvise(mmap.MADV_REMOVE)
