"""`paceline profile`: the communication of the trials of a run."""

from __future__ import annotations

from pathlib import Path

import click

from paceline.analysis.trial.communication import trial_communication
from paceline.analysis.trial.resource_checks import turns_flags
from paceline.base.errors import DataError
from paceline.cli.console import plain_console, print_json, print_text
from paceline.cli.options import json_option, run_dir_argument
from paceline.show.export.run_data import RunData
from paceline.show.report.profile import overview, profile_view


@click.command("profile")
@run_dir_argument
@click.option("--trial", metavar="ID", help="Show only this trial, in detail.")
@json_option
def command(run_dir: Path, trial: str | None, as_json: bool) -> None:
    """Show the communication time of a run by cause.

    RUN_DIR is the newest run in runs/ by default.
    """
    records = RunData(run_dir).chosen(trial)
    found = [each for record in records if (each := trial_communication(record)) is not None]
    if not found:
        names = ", ".join(record.trial.id for record in records)
        raise DataError(
            f"{run_dir}: expected a trial with steps after the warm-up in which ranks communicate, "
            f"found none among {names}; a single rank does not communicate"
        )
    if as_json:
        print_json({"trials": found})
    elif len(found) == 1:
        plain_console().print(profile_view(found[0]))
    else:
        plain_console().print(overview(found))
        print_text(f"\nin detail: paceline profile {run_dir} --trial {found[0].trial}")
    if not as_json:
        for flag in turns_flags(records):
            print_text(f"! {flag}")
