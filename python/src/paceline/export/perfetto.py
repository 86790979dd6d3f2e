"""Export to Perfetto: a trace of each trial for ui.perfetto.dev."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.report.trace import write_trace

if TYPE_CHECKING:
    from pathlib import Path

    from paceline.export.run_data import RunData


def write_perfetto(run: RunData, out: Path, trial: str | None) -> list[Path]:
    """Write `ID.json` for each trial, for ui.perfetto.dev."""
    written = []
    for record in run.chosen(trial):
        path = out / f"{record.trial.id}.json"
        write_trace(record, path)
        written.append(path)
    return written
