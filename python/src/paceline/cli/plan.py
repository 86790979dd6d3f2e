"""`paceline plan`: what a run would do."""

from __future__ import annotations

import click

from paceline.api import Plan
from paceline.cli.console import plain_console, print_json, print_text
from paceline.cli.experiment import ExperimentCommand, ExperimentRequest, takes_experiment
from paceline.cli.findings import print_search_plan, search_plan_json
from paceline.cli.options import json_option
from paceline.plan.spec.loading import Spec
from paceline.runner.trials.preview import ConfigurationPreview, DiskUse, Preview, duration
from paceline.runner.tune.local import plan_local
from paceline.show.report.section import Column, Table, terminal_table
from paceline.show.report.wording import NOT_MEASURED, megabytes, short_ids

_HOUR_S = 3600


@click.command("plan", cls=ExperimentCommand)
@takes_experiment
@click.option("--commands", is_flag=True, help="Show the exact command of each trial.")
@json_option
def command(request: ExperimentRequest, commands: bool, as_json: bool) -> None:
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
    else:
        if commands:
            for trial_id, line in planned.commands.items():
                print_text(f"# {trial_id}\n{line}")
            print()
        _print_preview(planned.preview, automatic=spec.experiment.repeats == "auto")
    planned.preview.check()


def _print_preview(preview: Preview, *, automatic: bool) -> None:
    """Print the configurations, the totals and the warnings. automatic: the run stops early."""
    console = plain_console()
    names = short_ids([each.configuration for each in preview.configurations])
    columns: list[Column[ConfigurationPreview]] = [
        Column("configuration", lambda each: names[each.configuration], "id"),
        Column("ranks", lambda each: str(each.ranks)),
        # a script decides its batch itself
        Column("global\nbatch", lambda each: str(each.global_batch or NOT_MEASURED)),
        Column("steps\n(warm-up)", _steps),
        Column("repeats", lambda each: f"{'≤ ' if automatic else ''}{each.repeats}"),
        Column("each\ntakes", _duration),
        Column("each\nMB", lambda each: megabytes(each.disk_bytes)),
    ]
    console.print(terminal_table(Table(columns=columns, items=preview.configurations)))
    for full, short in list(names.items())[:1]:
        if short != full:
            text = f"\nwhole name of the first one, for --only: {full}"
            console.print(text, soft_wrap=True)
    most = "at most " if automatic else ""
    console.print(f"\n{most}{preview.summary}")
    console.print(_disk_use_sentence(preview.disk))
    for text in preview.left_out:
        console.print(f"left out: {text}", soft_wrap=True)
    for text in preview.warnings:
        console.print(f"warning: {text}")
    for text in preview.load.lines:
        console.print(f"load: {text}", soft_wrap=True)


def _steps(each: ConfigurationPreview) -> str:
    steps = NOT_MEASURED if each.steps is None else str(each.steps)
    return f"{steps} ({each.warmup_steps})"


def _duration(each: ConfigurationPreview) -> str:
    return NOT_MEASURED if each.trial_s is None else duration(each.trial_s)


def _document(planned: Plan) -> dict[str, object]:
    preview = planned.preview
    return {
        "experiment": planned.experiment.name,
        "data": dict(planned.datasets),
        "trials": [
            {**trial.model_dump(mode="json"), "command": planned.commands[trial.id]}
            for trial in planned.trials
        ],
        "configurations": preview.configurations,
        "expected_s": preview.expected_s,
        "disk_use": preview.disk,
        "faults": preview.faults,
        "warnings": preview.warnings,
        "left_out": preview.left_out,
        "load": preview.load,
    }


def _disk_use_sentence(use: DiskUse) -> str:
    """Return the predicted disk use in MB, with the traces for each hour of training."""
    kept, most = megabytes(use.kept_bytes), megabytes(use.peak_bytes())
    traces_kept = megabytes(_HOUR_S * use.trace_kept_bytes_per_s)
    traces = megabytes(_HOUR_S * use.trace_training_bytes_per_s)
    return (
        f"disk: {kept} MB after the run, up to {most} MB while it trains; an hour of training adds "
        f"{traces} MB of traces until the trial ends, and {traces_kept} MB after that"
    )
