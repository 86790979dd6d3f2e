"""Descriptions of process groups, for their records."""

from __future__ import annotations

from typing import Any, TypedDict


class GroupDescription(TypedDict, total=False):
    """Settings of one process group. A key is absent where it does not apply."""

    library: str
    thread_level: str  # of MPI, as are the following
    algorithm: str  # as requested
    all_gather: str  # how long parts are gathered, if any were
    hosts: int
    not_shared: str  # why ranks of a host do not share memory
    by_size: list[dict[str, Any]]  # the chosen algorithm by the size of messages
    calibration_s: dict[str, dict[str, float]]  # measured seconds by algorithm and bytes
    calibration_took_s: float
