"""`paceline plan`: what a run would do."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import click

from paceline.api import Plan
from paceline.cli.console import print_json
from paceline.cli.experiment import ExperimentCommand, Request, takes_experiment
from paceline.cli.findings import print_search_plan, search_plan_json
from paceline.cli.options import json_option
from paceline.records.rows import SCHEMA
from paceline.report.wording import megabytes
from paceline.tune.local import plan_local

if TYPE_CHECKING:
    from paceline.runner import DiskUse
    from paceline.spec import Spec

_HOUR_S = 3600


@click.command("plan", cls=ExperimentCommand)
@takes_experiment
@click.option("--commands", is_flag=True, help="Show the exact command of each trial.")
@json_option
def command(request: Request, commands: bool, as_json: bool) -> None:
    """Show what a run would do; run nothing.

    It takes the same arguments and options as `paceline run`.
    """
    show_plan(request.load(), as_json=as_json, commands=commands)


def show_plan(spec: Spec, *, as_json: bool, commands: bool) -> None:
    """Print the trials of a spec, or what its [tune] search would measure."""
    if spec.experiment.tune is not None:
        search_plan = plan_local(spec)
        if as_json:
            print_json(search_plan_json(search_plan))
        else:
            print_search_plan(search_plan)
        return
    planned = Plan(spec)
    if as_json:
        print_json(_document(planned))
        return
    for number, (trial_id, line) in enumerate(planned.commands.items(), start=1):
        print(f"# {number}/{len(planned.commands)} {trial_id}")
        if commands:
            print(line)
    print(f"# {_disk_use_sentence(planned.disk_use)}")


def _document(planned: Plan) -> dict[str, object]:
    return {
        "schema": SCHEMA,
        "experiment": planned.experiment.name,
        "data": dict(planned.datasets),
        "trials": [
            {**trial.model_dump(mode="json"), "command": planned.commands[trial.id]}
            for trial in planned.trials
        ],
        "disk_use": dataclasses.asdict(planned.disk_use),
    }


def _disk_use_sentence(use: DiskUse) -> str:
    """Return the predicted disk use in MB, with the traces for each hour of training."""
    kept, most = megabytes(use.kept_bytes), megabytes(use.peak_bytes())
    traces_kept = megabytes(_HOUR_S * use.trace_kept_bytes_per_s)
    traces = megabytes(_HOUR_S * use.trace_training_bytes_per_s)
    return (
        f"disk: {kept} MB after the run, up to {most} MB while it trains; each hour of training "
        f"adds {traces_kept} MB of traces, {traces} MB until the end of the trial"
    )
