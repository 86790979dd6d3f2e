"""Communication of a rank: what a training reports of it, and the operations that have begun.

`communication` in `result.json` is what transport and strategy report. A key is absent where it
does not apply; extensions may add keys of their own.

`operations.bin` has the last operation that the rank has begun in each group. The file is mapped
into memory, so a note takes no system call, and it is there even if the rank is killed or holds
Python's lock for ever.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, with_config
from typing_extensions import TypedDict  # that of typing is no schema for pydantic in Python 3.11

from paceline.measure.records.files import content_of


# The fields of `collectives.description.GroupDescription`, and two more. A subclass of it would
# have the type of typing's TypedDict, and collectives cannot use that of typing_extensions.
class TransportResult(TypedDict, total=False):
    library: str
    interface: str
    device: str  # of this rank
    thread_level: str  # of MPI, as are the following
    algorithm: str  # as requested
    all_gather: str  # how long parts are gathered, if any were
    hosts: int
    not_shared: str  # why ranks of a host do not share memory
    by_size: list[dict[str, Any]]  # the chosen algorithm by the size of messages
    calibration_s: dict[str, dict[str, float]]  # measured seconds by algorithm and bytes
    calibration_took_s: float


class CompressionResult(TypedDict, total=False):
    method: str
    error_feedback: bool
    block: int  # elements with one scale
    clip_standard_deviations: float | None  # None: not clipped
    density: float
    rank: int  # of the matrices of PowerSGD
    start_step: int  # the first one that PowerSGD compresses


class FactorResult(TypedDict, total=False):
    """Choice of the linear layers that send factors; empty without such layers."""

    setting: str
    speeds: dict[str, float] | None  # see costs.factor_cost.Speeds; None: not measured
    reason: str | None  # why no layer sends factors although its costs are lower
    layers: list[dict[str, Any]]  # see strategies.reduction.factor_choice.LayerChoice


class AveragingResult(TypedDict):
    period: int  # steps
    start_step: int
    momentum: str


class StrategyResult(TypedDict, total=False):
    """Report of a strategy. Its parts, such as a sum of gradients, report some of the keys."""

    # of a GPU
    device: str
    tf32: bool  # of matrix products and convolutions of float32
    cudnn_deterministic: bool  # false: cuDNN has measured its kernels and used the fastest

    # bytes that a rank sends in a step; absent if it sends none
    sent_bytes_per_step: float
    uncompressed_bytes_per_step: float  # of an all-reduce of all gradients

    # sums of gradients
    bucket_bytes: list[int]
    buckets_in_flight: int  # at most
    bucket_wait_ms: float
    compression: CompressionResult
    sufficient_factors: FactorResult
    shard_bytes: list[int]  # by rank
    unit_bytes: list[int]  # parameters that are gathered together

    # partition of a model into stages; bytes are per step and replica
    split_points: list[int]
    first_layers: list[str]  # by split point
    bytes_forward: list[int]  # by split point
    bytes_backward: list[int]
    stashed_versions: int  # of PipeDream, as are the following
    stashed_bytes: int

    # under fp16
    loss_scale: float  # at the end
    skipped_steps: int  # their gradients were not finite

    # updates without a sum in every step
    update_mode: str
    averaging: AveragingResult
    period: int  # steps in a round of Spark tasks, as are the following
    momentum: str | None
    round_bytes: int
    rounds: int
    moved_ranks: int  # how often another process was the rank before


@with_config(ConfigDict(extra="allow"))
class Communication(TransportResult, StrategyResult, total=False):
    transport: str


# --- operations.bin ---------------------------------------------------------------------------

_SLOTS = 32  # groups; later ones are not noted
# group, operation, sequence number, operations that have not ended, begin of the last one
_SLOT = struct.Struct("<64s24sqqd")


@dataclass(frozen=True, slots=True, kw_only=True)
class LastOperation:
    """The operation that a rank began last in a group."""

    group: str
    operation: str
    sequence: int
    pending: int  # operations of the group that have not ended
    begun_unix_s: float


class OperationNotes:
    """Writes the file of one rank."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w+b") as file:
            file.truncate(_SLOTS * _SLOT.size)
            self._memory = mmap.mmap(file.fileno(), _SLOTS * _SLOT.size)
        self._slots: dict[str, int] = {}
        self._pending: dict[str, int] = {}

    def begun(self, group: str, operation: str, sequence: int, unix_s: float) -> None:
        slot = self._slots.setdefault(group, len(self._slots))
        count = self._pending[group] = self._pending.get(group, 0) + 1
        if slot < _SLOTS:
            values = group.encode()[:64], operation.encode()[:24], sequence, count, unix_s
            _SLOT.pack_into(self._memory, slot * _SLOT.size, *values)

    def ended(self, group: str) -> None:
        count = self._pending[group] = self._pending.get(group, 1) - 1
        slot = self._slots.get(group, _SLOTS)
        if slot < _SLOTS:
            begin = slot * _SLOT.size
            name, operation, sequence, _, unix_s = _SLOT.unpack_from(self._memory, begin)
            _SLOT.pack_into(self._memory, begin, name, operation, sequence, count, unix_s)

    def close(self) -> None:
        self._memory.close()


def last_operations(path: Path) -> list[LastOperation]:
    """Return the last operation of each group; empty without a file or if it is cut short."""
    try:
        content = content_of(path)
    except FileNotFoundError:
        return []
    found = []
    for begin in range(0, len(content) - _SLOT.size + 1, _SLOT.size):
        group, operation, sequence, pending, unix_s = _SLOT.unpack_from(content, begin)
        if unix_s:
            found.append(
                LastOperation(
                    group=group.rstrip(b"\0").decode(errors="replace"),
                    operation=operation.rstrip(b"\0").decode(errors="replace"),
                    sequence=sequence,
                    pending=pending,
                    begun_unix_s=unix_s,
                )
            )
    return found
