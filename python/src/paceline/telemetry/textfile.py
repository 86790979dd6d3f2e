"""A run's last values as a file in Prometheus's text format, for runs shorter than a scrape.

Without times, as node_exporter's textfile collector takes none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.records.files import write_text
from paceline.telemetry.exposition import Exposition
from paceline.telemetry.measures import watch_values

if TYPE_CHECKING:
    from pathlib import Path

    from paceline.telemetry.ticks import WatchTick


def final_text(tick: WatchTick, host: str) -> str:
    """The run's values on `host`, and nothing of the host: node_exporter has that, and refuses
    what two files say."""
    return Exposition().text_of(watch_values(host, tick))


def textfile_path(directory: Path, host: str, run: str) -> Path:
    """Where a run's values lie in node_exporter's directory: one file for all trials, as two with
    the same series would be refused."""
    return directory / f"paceline-{host}-{run}.prom"


def write_textfile(directory: Path, host: str, tick: WatchTick) -> None:
    """Replace the run's file in `directory` atomically. Raises OSError."""
    write_text(textfile_path(directory, host, tick.run), final_text(tick, host))
