"""Labs for tests: skipped with a reason where there can be none, and gone afterwards."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from paceline.lab import Lab, LabSettings, removal, why_not
from paceline.lab.registry import Registry

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from paceline.lab.record import LabRecord


@contextmanager
def lab_or_skip(settings: LabSettings, logs: Path | None = None) -> Iterator[Lab]:
    """A lab of its own; afterwards nothing is left of it."""
    skip_where_impossible()
    with Lab(settings, logs=logs) as lab:
        yield lab
    assert traces_of(lab.record) == []


def skip_where_impossible() -> None:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)


def traces_of(record: LabRecord) -> list[str]:
    """Whatever there is of a lab on this machine."""
    return removal.traces_of(record, Registry())
