"""The samples of a script's steps: those of the forward passes that its backward passes reach.

A forward pass is the call of an outermost module with parameters. Evaluations, a pass with a dummy
input, transforms and losses are calls, too, but no gradient reaches them, or they have no input of
their own. A batch of a DataLoader counts once, when it is reached: some frameworks fetch one
ahead, and a GAN passes over one several times. Without a DataLoader the inputs count. Where their
samples cannot be told, the number of the step is not known.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from paceline.base.torch_internals import DataLoaderIterator, is_traced
from paceline.train.rank.script.phases import replaced

_CHECKSUM_BYTES = 8
_IMAGE_CHANNELS = (1, 3, 4)
_PAIR = 2  # nodes of an edge
_KEPT_BATCHES = 16  # of a DataLoader, which were fetched and not seen in a forward pass


@dataclass(slots=True, eq=False)
class _Batch:
    """A batch of a DataLoader. places: of its tensors in memory."""

    samples: int | None
    places: frozenset[int]
    sha256: str | None = None
    is_counted: bool = False


@dataclass(slots=True)
class _Loader:
    """The batches of a DataLoader's iterator that no forward pass has used, and the last used one.

    places: of the inputs of that forward pass, which may be copies of the batch.
    """

    waiting: deque[_Batch] = field(default_factory=lambda: deque(maxlen=_KEPT_BATCHES))
    used: _Batch | None = None
    places: frozenset[int] = frozenset()


@dataclass(slots=True, eq=False)
class _Call:
    """A forward pass that a backward pass may reach."""

    samples: int | None
    batch: _Batch | None
    sha256: str | None


class BatchCounter:
    """Counts the samples of this rank, step by step."""

    def __init__(self) -> None:
        self.first_sha256: str | None = None  # of the first batch that was trained on
        self.has_passed = False  # whether a pass was seen since the last step
        self._loaders: WeakKeyDictionary[Any, _Loader] = WeakKeyDictionary()
        self._newest: _Loader | None = None
        self._depth: list[nn.Module] = []  # modules whose forward pass is under way
        self._is_inside = False  # a backward pass or the DataLoader
        self._reached: dict[int, _Call] = {}  # by the backward pass that is under way
        self._time_first: set[int] = set()  # outermost modules
        self._time_first_shape: torch.Size | None = None  # of the call under way: time, batch
        self._outermost: dict[int, nn.Module] = {}
        self._handles: list[Any] = []
        self._counted: int | None = None  # samples of the step so far
        self._is_doubtful = False

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Notice batches, forward and backward passes while the context is active."""
        self._handles = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, with_kwargs=True),
        ]
        try:
            with (
                replaced(DataLoaderIterator, "__next__", self._next),
                replaced(torch.autograd, "backward", self._backward),
                replaced(torch.autograd, "grad", self._backward),
            ):
                yield
        finally:
            self._remove_hooks()

    def settle(self) -> None:
        """Follow only the outermost modules so far: hooks of all modules cost time in each."""
        self._remove_hooks()
        for module in self._outermost.values():
            enter, leave = _Hook(self._enter), _Hook(self._leave)
            self._handles.append(module.register_forward_pre_hook(enter))
            self._handles.append(module.register_forward_hook(leave, with_kwargs=True))

    def take(self) -> int | None:
        """Return the samples of the step that ends; None if they are not known."""
        counted = None if self._is_doubtful else self._counted
        self._counted, self._is_doubtful, self.has_passed = None, False, False
        self._depth.clear()
        return counted

    def _remove_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    # --- batches ---

    def _next(self, function: Callable[..., Any], iterator: Any) -> Any:
        before, self._is_inside = self._is_inside, True
        try:
            batch = function(iterator)
        finally:
            self._is_inside = before
        self._newest = self._loaders.setdefault(iterator, _Loader())
        sha256 = _sha256(batch) if self.first_sha256 is None else None
        self._newest.waiting.append(_Batch(rows_of(batch), _places(batch), sha256))
        return batch

    def _used_batch(self, inputs: Any) -> _Batch | None:
        """Return the batch of a forward pass; None without a DataLoader.

        Where the inputs are copies, it is the oldest that waits: frameworks fetch ahead.
        """
        places = _places(inputs)
        for loader in self._loaders.values():
            if loader.used is not None and places & (loader.used.places | loader.places):
                return loader.used
            for number, batch in enumerate(loader.waiting):
                if places & batch.places:
                    return _use(loader, number, places)
        newest = self._newest
        if newest is None or not newest.waiting:
            return None if newest is None else newest.used
        return _use(newest, 0, places)

    # --- forward passes ---

    def _enter(self, module: nn.Module, _inputs: Any) -> None:
        if not (self._is_inside or is_traced()):
            self._depth.append(module)

    def _leave(self, module: nn.Module, inputs: Any, named: dict[str, Any], outputs: Any) -> None:
        if self._is_inside or is_traced() or not self._depth:
            return
        while self._depth.pop() is not module and self._depth:
            pass  # its forward pass has failed
        if not self._depth:
            self._called(module, (*inputs, *named.values()), outputs)
        elif getattr(module, "batch_first", True) is False:
            first = next(_plain_tensors(inputs), None)
            if first is not None and first.dim() == 3:  # time, batch, features
                self._time_first_shape = first.shape[:2]

    def _called(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        """Note the forward pass of an outermost module, and whether a backward pass reaches it."""
        shape, self._time_first_shape = self._time_first_shape, None
        if not any(each.requires_grad for each in module.parameters()):
            return
        own = list(_plain_tensors(inputs))
        if any(each.grad_fn is not None for each in own):
            return  # it continues another forward pass, as a discriminator that a generator feeds
        batch = self._used_batch(inputs)
        found = [each for each in tensors_in(outputs) if each.requires_grad]
        if not found or not torch.is_grad_enabled():
            return
        self.has_passed = True
        self._outermost.setdefault(id(module), module)
        if shape is not None and own and own[0].shape[:2] == shape:
            self._time_first.add(id(module))
        samples = rows_of(inputs)
        if id(module) in self._time_first and own and own[0].dim() > 1:
            samples = own[0].shape[1]
            if batch is not None:
                batch.samples = samples
        elif samples and not any(_fits(each, samples) for each in found):
            samples = None
        sha256 = _sha256(inputs) if self.first_sha256 is None and batch is None else None
        call = _Call(samples, batch, sha256 if batch is None else batch.sha256)
        for each in found:
            each.register_hook(partial(self._reach, call))  # type: ignore[no-untyped-call]

    def _reach(self, call: _Call, _gradient: Tensor) -> None:
        self._reached[id(call)] = call

    # --- backward passes ---

    def _backward(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        before, self._is_inside = self._is_inside, True
        try:
            result = function(*arguments, **named)
        finally:
            self._is_inside = before
        self.has_passed = True
        self._depth.clear()
        self._count()
        return result

    def _count(self) -> None:
        """Count what the backward pass has reached."""
        calls, self._reached = list(self._reached.values()), {}
        if not calls:  # of a function, or of a module that torch has compiled
            batch = self._used_batch(())
            calls = [] if batch is None else [_Call(None, batch, batch.sha256)]
        if self.first_sha256 is None and calls:
            self.first_sha256 = calls[0].sha256
        batches = {id(each.batch): each.batch for each in calls if each.batch is not None}
        for batch in batches.values():
            if not batch.is_counted or self._counted is None:
                batch.is_counted = True
                self._add(batch.samples)
        if not batches:
            for call in calls:
                self._add(call.samples)

    def _add(self, samples: int | None) -> None:
        if samples is None:
            self._is_doubtful = True
        else:
            self._counted = (self._counted or 0) + samples


class _Hook:
    """Calls a method for a module; does nothing in a copy or in a pickle of the module."""

    def __init__(self, method: Callable[..., None]) -> None:
        self._method = method

    def __call__(self, *arguments: Any) -> None:
        self._method(*arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")  # a pickle that needs no Paceline


def _use(loader: _Loader, number: int, places: frozenset[int]) -> _Batch:
    """Use a waiting batch; those before it were fetched for something else."""
    for _ in range(number):
        loader.waiting.popleft()
    loader.used, loader.places = loader.waiting.popleft(), places
    return loader.used


def _places(value: Any) -> frozenset[int]:
    """Return the places of the tensors in memory."""
    return frozenset(each.data_ptr() for each in _plain_tensors(value) if each.numel())


def _fits(output: Tensor, samples: int) -> bool:
    """Return whether an output may have a row, or several, of each sample, or is a loss."""
    return not output.dim() or output.numel() == 1 or len(output) % samples == 0


def _plain_tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors that are no scalars and not sharded over ranks."""
    for each in tensors_in(value):
        if each.dim() and not isinstance(each, DTensor) and each.layout == torch.strided:
            yield each


def _sha256(value: Any) -> str | None:
    """Return a checksum of all tensors; None if there are none."""
    tensors = list(_plain_tensors(value))
    found = hashlib.sha256()
    for each in tensors:
        data = each.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        found.update(repr((each.shape, each.dtype)).encode())
        found.update(data.numpy().tobytes())
    return found.hexdigest() if tensors else None


def rows_of(batch: Any) -> int | None:
    """Return the number of samples of a batch or of the inputs of a module; None if not known.

    It is the length of the first tensor, or that of a list of images of their own sizes or of
    mappings, one for each sample.
    """
    items = _items_of(batch)
    if items:
        return len(items)
    parts = list(batch.values()) if isinstance(batch, Mapping) else batch
    if isinstance(parts, list | tuple) and parts and _may_be_images(parts) and _differ(parts):
        return None  # images, or several tensors of few samples
    tensors = samples_of(batch)
    return len(_nodes_of_graphs(batch) or tensors[0]) if tensors else None


def _items_of(batch: Any) -> list[Any]:
    """Return the samples of a batch that is a list of them, such as images with boxes.

    Beside a list of images there may be another one, of what belongs to each. Empty: it is none.
    """
    parts = list(batch.values()) if isinstance(batch, Mapping) else batch
    if not isinstance(parts, list | tuple) or not parts:
        return []
    if isinstance(parts, list) and _are_samples(parts):
        return list(parts)
    first, *others = parts
    if not isinstance(first, list | tuple) or not first:
        return []
    are_images = _may_be_images(first) and (_differ(first) or _has_list_as_long(others, len(first)))
    if not (are_images or _are_samples(first)):
        return []
    beside = [each for each in others if isinstance(each, list | tuple) and len(each) == len(first)]
    return list(zip(first, *beside, strict=True))


def _are_samples(values: Sequence[Any]) -> bool:
    """Return whether values are mappings of one sample each.

    The tensors of a batch have one length; those of several batches may have more dimensions.
    """
    if not all(isinstance(each, Mapping) for each in values):
        return False
    lengths = [{len(t) for t in tensors_in(each) if t.dim()} for each in values]
    if any(len(each) > 1 for each in lengths):
        return True
    are_sequences = all(t.dim() <= 1 for each in values for t in tensors_in(each))
    return are_sequences and len(set().union(*lengths)) > 1


def _nodes_of_graphs(batch: Any) -> list[int] | None:
    """Return how many nodes each graph of a batch has; empty: not known; None: no graphs.

    Graphs are batched as features of nodes, edges as pairs of nodes, and the graph of each node.
    """
    first, *others = [t for t in tensors_in(batch) if t.dim() and len(t)] or [torch.ones(0)]
    nodes, indices = len(first), [each for each in others if each.dtype == torch.int64]
    if nodes <= _PAIR or not any(_are_pairs(each, nodes) for each in indices):
        return None
    for each in indices:
        if each.shape == (nodes,) and not int(each[0]) and bool((each[1:] >= each[:-1]).all()):
            counts = torch.bincount(each)
            if len(counts) < nodes and bool(counts.all()):
                return counts.tolist()
    return []


def _are_pairs(indices: Tensor, nodes: int) -> bool:
    return (
        indices.dim() == _PAIR
        and len(indices) == _PAIR
        and bool(indices.numel())
        and int(indices.min()) >= 0
        and int(indices.max()) < nodes
    )


def _may_be_images(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(
        isinstance(each, Tensor)
        and each.dim() == 3  # channels, height, width
        and len(each) in _IMAGE_CHANNELS
        for each in value
    )


def _differ(tensors: Sequence[Tensor]) -> bool:
    return len({each.shape for each in tensors}) > 1


def _has_list_as_long(parts: Sequence[Any], length: int) -> bool:
    """Return whether a part has something of each image: a list, or a tensor with labels."""
    return any(
        len(part) == length and not (isinstance(part, list | tuple) and _may_be_images(part))
        for part in parts
        if (isinstance(part, list | tuple) or (isinstance(part, Tensor) and part.dim()))
    )


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of a tensor, or of nested lists, tuples and mappings."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from tensors_in(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors_in(each)


def samples_of(batch: Any) -> list[Tensor]:
    """Return the tensors of a batch that are as long as its first one; the samples are their rows.

    Empty if there are none, or if they are sharded over ranks.
    """
    tensors = [tensor for tensor in tensors_in(batch) if tensor.dim() and len(tensor)]
    if any(isinstance(tensor, DTensor) for tensor in tensors):
        return []
    return [tensor for tensor in tensors if len(tensor) == len(tensors[0])]


def checksums(batch: Any) -> list[str] | None:
    """Return a checksum of each sample of a batch; None if it has no samples.

    Empty where they are nodes of graphs: other graphs may have the same ones.
    """
    items = _items_of(batch)
    if items:
        return [_checksum(b"".join(map(_bytes, _plain_tensors(each)))) for each in items]
    tensors = samples_of(batch)
    if not tensors:
        return None
    graphs = _nodes_of_graphs(batch)
    if graphs is not None:  # the number of a graph is its place in the batch
        own = (each for each in tensors[1:] if each.dim() > 1 or each.is_floating_point())
        tensors = [tensors[0], *own]
    parts = [
        tensor.detach().cpu().contiguous().reshape(len(tensor), -1).view(torch.uint8).numpy()
        for tensor in tensors
    ]
    rows: Any = np.concatenate(parts, axis=1)
    if graphs is not None:
        rows = np.split(rows, np.cumsum(graphs)[:-1]) if graphs else []
    return [_checksum(row.tobytes()) for row in rows]


def places_in(batch: Sequence[Tensor], inputs: Any) -> list[int]:
    """Return the places of a module's rows in the tensors of a batch; empty if it has others."""
    own = next(iter(samples_of(inputs)), None)
    if own is None:
        return []
    rows = checksums(own) or []
    for tensor in batch:
        if tensor.dtype == own.dtype and tensor.shape[1:] == own.shape[1:]:
            places = {row: place for place, row in enumerate(checksums(tensor) or [])}
            if len(places) == len(tensor) and all(row in places for row in rows):
                return [places[row] for row in rows]
    return []


def _checksum(row: bytes) -> str:
    return hashlib.blake2b(row, digest_size=_CHECKSUM_BYTES).hexdigest()


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
