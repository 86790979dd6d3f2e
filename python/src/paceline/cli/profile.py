"""`paceline profile`: choose trials of a run and show their communication."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from paceline.analysis.communication import trial_communication
from paceline.cli.console import plain_console, print_json
from paceline.errors import DataError, UsageError
from paceline.records.files import jsonable
from paceline.records.rows import SCHEMA
from paceline.report.profile import overview, profile_view
from paceline.report.trace import write_trace

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from paceline.analysis.communication import TrialCommunication
    from paceline.analysis.reading import TrialRecord
    from paceline.export.run_data import RunData


def show_profile(run: RunData, *, trial_id: str | None, as_json: bool, trace: Path | None) -> None:
    """Print the profile of one trial, or one line for each of several; write the trace.

    Raises UsageError if there is no such trial, or for a trace of several trials; DataError if no
    trial communicated.
    """
    records = run.chosen(trial_id)
    found = [(r, p) for r in records if (p := trial_communication(r)) is not None]
    if not found:
        raise DataError(
            f"{run.files.root}: expected a trial with steps after the warm-up in which ranks "
            f"communicate, found none among {_names(records)}; a single rank does not "
            "communicate"
        )
    if trace is not None:
        _write_trace([record for record, _ in found], trace)
    _show([profile for _, profile in found], as_json)


def _show(profiles: list[TrialCommunication], as_json: bool) -> None:
    if as_json:
        document = {"schema": SCHEMA, "trials": jsonable(profiles)}
        print_json(document)
        return
    console = plain_console()
    if len(profiles) == 1:
        console.print(profile_view(profiles[0]))
        return
    console.print(overview(profiles))
    print(f"\nin detail: paceline profile RUN_DIR --trial {profiles[0].trial}")


def _write_trace(records: list[TrialRecord], out: Path) -> None:
    if len(records) > 1:
        raise UsageError(
            f"--trace: expected one trial, but {len(records)} communicate; choose one with "
            f"--trial: {_names(records)}"
        )
    write_trace(records[0], out)
    print(f"paceline: wrote {out}; open it at https://ui.perfetto.dev", file=sys.stderr)


def _names(records: Sequence[TrialRecord]) -> str:
    return ", ".join(record.trial.id for record in records)
