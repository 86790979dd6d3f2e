"""The state of a training in safetensors files: each rank writes its part, every rank reads all.

A file is written by hand, tensor by tensor, because the safetensors package would first copy
everything into Python's memory. It is read with the package, which checks the header.
"""

from __future__ import annotations

import copy
import json
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from paceline.base.errors import DataError
from paceline.measure.records.documents import Checkpoint, HashedFile
from paceline.train.training.state import Elements, RankState, join_elements

SCHEMA = 1
_PIECE_BYTES = 4 << 20
_METADATA = "paceline"
_REPLICA = re.compile(r"replica/\d+/")
_LARGEST_METADATA_BYTES = 64 << 20  # a position, and a line for each tensor
_TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


_Natural = Annotated[int, Field(ge=0)]


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Position(_Strict):
    """Position of a training, and the identity of its task."""

    steps: int  # optimiser steps done
    task_sha256: str  # of everything that the state depends on; see rank.checkpoints
    # with weights or optimiser state of their own; 1 if all are equal
    replicas: Annotated[int, Field(ge=1, le=1_000_000)]


class _Place(_Strict):
    name: str
    shape: list[_Natural]
    strides: list[_Natural]
    start: _Natural


class _Metadata(_Strict):
    """Everything but the tensors, as JSON in the header of a file."""

    schema_version: int
    position: Position
    places: list[_Place]  # of the tensors "0", "1", ... of the file
    values: dict[str, Any]


def write_state(file: HashedFile, state: RankState, position: Position) -> Iterator[None]:
    """Write a rank's part of the state as a safetensors file, and yield after each piece."""
    metadata = _Metadata(
        schema_version=SCHEMA,
        position=position,
        places=[
            _Place(name=t.name, shape=list(t.shape), strides=list(t.strides), start=t.start)
            for t in state.tensors
        ],
        values=state.values,
    )
    header: dict[str, Any] = {"__metadata__": {_METADATA: metadata.model_dump_json()}}
    end = 0
    for number, tensor in enumerate(state.tensors):
        values = tensor.values
        begin, end = end, end + values.nbytes
        header[str(number)] = {
            "dtype": _TYPES[values.dtype], "shape": [values.numel()], "data_offsets": [begin, end],
        }  # fmt: skip
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for tensor in state.tensors:
        content = tensor.values.detach().cpu().contiguous().view(torch.uint8).numpy().data
        for start in range(0, len(content), _PIECE_BYTES):
            file.write(content[start : start + _PIECE_BYTES])
            yield


class StateFiles:
    """A checkpoint that is being read: an implementation of SavedState."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        """Read the headers. Raises DataError if they are not of one checkpoint of this version."""
        self._parts: dict[str, list[tuple[int, str, _Place]]] = defaultdict(list)
        self._values: dict[str, Any] = {}
        self._own: int | None = None  # the reader's replica, if the number of replicas is the same
        self.checkpoint = checkpoint
        positions = []
        for rank in range(checkpoint.ranks):
            metadata = _read_metadata(checkpoint.part(rank))
            positions.append(metadata.position)
            self._values |= metadata.values
            for number, place in enumerate(metadata.places):
                self._parts[place.name].append((rank, str(number), place))
        self.position = positions[0]
        self.steps = self.position.steps
        if any(p != self.position for p in positions) or self.steps != checkpoint.steps:
            raise DataError(f"{checkpoint.folder}: its files are of different checkpoints")

    def of_replica(self, replica: int, replicas: int) -> StateFiles:
        view = copy.copy(self)
        view._own = replica if replicas == self.position.replicas else None  # noqa: SLF001  (a copy)
        return view

    def names(self, prefix: str) -> list[str]:
        stored = [*self._parts, *self._values]
        names = dict.fromkeys(_REPLICA.sub("", name, count=1) for name in stored)
        return [name.removeprefix(prefix) for name in names if name.startswith(prefix)]

    def tensor(self, name: str) -> Tensor | None:
        if name in self._parts:
            return self._whole(name)
        found = [self._whole(each) for each in self._of_replicas(name) if each in self._parts]
        if not found:
            return None
        if len(found) == 1 or not found[0].is_floating_point():
            return found[0]
        return torch.stack(found).mean(0)

    def value(self, name: str) -> Any:
        names = (name, *self._of_replicas(name))
        return next((self._values[each] for each in names if each in self._values), None)

    def _of_replicas(self, name: str) -> list[str]:
        numbers = range(self.position.replicas) if self._own is None else [self._own]
        return [f"replica/{number}/{name}" for number in numbers]

    def _whole(self, name: str) -> Tensor:
        return join_elements(name, (self._elements(*part) for part in self._parts[name]))

    def _elements(self, rank: int, key: str, place: _Place) -> Elements:
        path = self.checkpoint.part(rank)
        with _opened(path) as file:
            values = file.get_tensor(key)
        return Elements(
            name=place.name,
            shape=tuple(place.shape),
            strides=tuple(place.strides),
            start=place.start,
            values=values.reshape(-1),
        )


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise DataError(f"{path}: expected a safetensors file: {error}") from error


def _read_metadata(path: Path) -> _Metadata:
    with _opened(path) as file:
        text = (file.metadata() or {}).get(_METADATA, "")
        names = set(file.keys())
    if len(text) > _LARGEST_METADATA_BYTES:
        raise DataError(
            f"{path}: expected at most {_LARGEST_METADATA_BYTES} characters of metadata, got "
            f"{len(text)}"
        )
    try:
        metadata = _Metadata.model_validate_json(text)
    except ValidationError as error:
        raise DataError(f"{path}: expected a part of a checkpoint: {error}") from error
    if metadata.schema_version != SCHEMA:
        raise DataError(
            f"{path}: expected schema {SCHEMA}, got {metadata.schema_version}: it is of another "
            "version of Paceline"
        )
    if names != {str(number) for number in range(len(metadata.places))}:
        raise DataError(f"{path}: expected a place for each tensor")
    return metadata
