"""Labs for tests, with the check that nothing is left of them afterwards."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from paceline.lab import Lab, LabSettings, removal
from paceline.lab.registry import Registry

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from paceline.lab.record import LabRecord


@contextmanager
def checked_lab(settings: LabSettings, logs: Path | None = None) -> Iterator[Lab]:
    """Make a lab, and check at the end that it left nothing.

    Tests that use it carry `@pytest.mark.needs("lab")`.
    """
    with Lab(settings, logs=logs) as lab:
        yield lab
    assert traces_of(lab.record) == []


def traces_of(record: LabRecord) -> list[str]:
    """List everything that exists of a lab on this machine."""
    return removal.traces_of(record, Registry())
