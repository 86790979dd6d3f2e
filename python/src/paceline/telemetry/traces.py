"""The ends of traces: what a sampler that takes over must know of what was written before."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_BLOCK_BYTES = 4096
_END_BYTES = 1 << 18  # holds some ticks of a host with many cores, devices and ranks


def cut_unfinished_row(path: Path) -> None:
    """Cut off what a killed sidecar left of its last row, so that ours does not stick to it."""
    if not path.exists():
        return
    with path.open("r+b") as file:
        end = position = file.seek(0, os.SEEK_END)
        while position > 0:
            start = max(0, position - _BLOCK_BYTES)
            file.seek(start)
            newline = file.read(position - start).rfind(b"\n")
            if newline >= 0:
                position = start + newline + 1
                break
            position = start
        if position < end:
            file.truncate(position)


def rows_of_the_end(path: Path) -> Iterator[dict[str, Any]]:
    """The whole rows among the last 256 KiB, in order. Raises OSError."""
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        start = max(0, end - _END_BYTES)
        file.seek(start)
        content = file.read()
    lines = content.split(b"\n")[(1 if start else 0) : -1]
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            continue  # another reader says which line is damaged
        if isinstance(row, dict):
            yield row


def last_row(path: Path, field: str) -> dict[str, Any] | None:
    """The last row that has `field`; None where there is none."""
    found = None
    try:
        for row in rows_of_the_end(path):
            if field in row:
                found = row
    except OSError:
        return None
    return found
