"""The record of `repeats = "auto"`: each look at the ranking, and why no further repeat ran."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from paceline.records.files import jsonable, write_json
from paceline.records.rows import SCHEMA
from paceline.records.typed import document

if TYPE_CHECKING:
    from paceline.records.layout import RunFiles


@dataclass(frozen=True, slots=True, kw_only=True)
class LookRecord:
    """One look, after some repeats."""

    repeats: int
    level: float  # of the tests at this look
    undecided: dict[str, tuple[str, ...]]  # configurations by workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopping:
    """Content of `repeats.json`."""

    max_repeats: int
    tie_margin: float  # of a ratio
    looks: tuple[LookRecord, ...] = ()
    stopped: Literal["decided", "max_repeats", "time"] | None = None  # None: the run goes on
    schema: int = SCHEMA

    @property
    def level(self) -> float | None:
        """The level of the last look, at which the ranking is tested; None before the first."""
        return self.looks[-1].level if self.looks else None


def read_stopping(run: RunFiles) -> Stopping | None:
    """Return the record; None for a fixed number of repeats. Raises DataError if it is damaged."""
    return document(run.repeats, Stopping)


def write_stopping(run: RunFiles, stopping: Stopping) -> None:
    """Replace the record."""
    write_json(run.repeats, jsonable(stopping))
