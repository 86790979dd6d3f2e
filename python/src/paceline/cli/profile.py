"""`paceline profile`: choose trials of a run and show their communication."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.analysis.communication import trial_communication
from paceline.cli.console import plain_console, print_json
from paceline.errors import DataError
from paceline.records.files import jsonable
from paceline.records.rows import SCHEMA
from paceline.report.profile import overview, profile_view

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.analysis.communication import TrialCommunication
    from paceline.analysis.reading import TrialRecord
    from paceline.export.run_data import RunData


def show_profile(run: RunData, *, trial_id: str | None, as_json: bool) -> None:
    """Print the profile of one trial, or one line for each of several.

    Raises UsageError if there is no such trial, DataError if no trial communicated.
    """
    records = run.chosen(trial_id)
    found = [p for r in records if (p := trial_communication(r)) is not None]
    if not found:
        raise DataError(
            f"{run.files.root}: expected a trial with steps after the warm-up in which ranks "
            f"communicate, found none among {_names(records)}; a single rank does not "
            "communicate"
        )
    _show(found, as_json)


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


def _names(records: Sequence[TrialRecord]) -> str:
    return ", ".join(record.trial.id for record in records)
