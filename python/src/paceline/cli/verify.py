"""`paceline verify`: does a training script train the same in every layout?"""

from __future__ import annotations

from pathlib import Path

import click

from paceline.base.errors import ExitCode
from paceline.cli.console import plain_console, print_json
from paceline.cli.experiment import (
    ExperimentCommand,
    ScriptOptions,
    is_script,
    script_experiment,
    vary_option,
)
from paceline.cli.options import count, json_option, list_option, out_option
from paceline.cli.progress import ConsoleProgress
from paceline.measure.records.files import fields_of
from paceline.plan.spec import load_spec
from paceline.runner.trials.directory import default_run_dir
from paceline.runner.trials.planning import plan
from paceline.runner.trials.verify_script import VerifiedLayout, VerifiedScript, verify_script
from paceline.show.report.section import Cell, Column, Section, Table, terminal_view

_STEPS = 4
_MARKS = {True: ("✓", "yes"), False: ("✗", "no"), None: ("?", "unknown")}
_CODES = {True: ExitCode.OK, False: ExitCode.NOT_EQUIVALENT, None: ExitCode.NOT_COMPARABLE}


@click.command("verify", cls=ExperimentCommand)
@click.argument("spec", metavar="SCRIPT.py")
@click.argument("script_arguments", metavar="[ARGS...]", nargs=-1, type=click.UNPROCESSED)
@list_option("--launcher", "NAME,…", "Launchers of several ranks; default: torchrun.")
@list_option("--transport", "NAME,…", "Transports between ranks; default: gloo.")
@click.option(
    "--ranks",
    "--nproc-per-node",
    metavar="N",
    type=count,
    default=2,
    help="Ranks of each layout; they may share cores.",
)
@vary_option
@click.option(
    "--steps",
    metavar="N",
    type=count,
    default=_STEPS,
    help="Compare so many steps of the optimiser.",
)
@out_option("RUN_DIR", "Write the run here; default: runs/verify-NAME-DATE-TIME.")
@click.option("-q", "--quiet", is_flag=True, help="Show no progress.")
@json_option
def command(
    spec: str,
    script_arguments: tuple[str, ...],
    launcher: tuple[str, ...],
    transport: tuple[str, ...],
    ranks: int,
    vary: tuple[tuple[str, ...], ...],
    steps: int,
    out: Path | None,
    quiet: bool,
    as_json: bool,
) -> int:  # fmt: skip
    """Show whether a training script trains the same in every layout.

    The script runs unchanged: in one process, and in each layout. A ✗ names the first step, module
    and tensor that differ, and the likely cause.
    """
    if not is_script(spec):
        raise click.UsageError(f"{spec}: expected a script (FILE.py)")
    options = ScriptOptions(
        launcher=launcher,
        transport=transport,
        ranks=ranks,
        local_strategy=("processes",),
        max_steps=steps,
        warmup_steps=0,
        vary=vary,
    )
    source = script_experiment(Path(spec), script_arguments, options)
    for trial in source["trials"]:
        if "ranks_per_node" in trial:
            trial["oversubscribe"] = True  # nothing is timed
    loaded = load_spec({**source, "repeats": 1, "telemetry": {"enabled": False}})
    run_dir = out or default_run_dir(f"verify-{loaded.experiment.name}")
    with ConsoleProgress(quiet=quiet) as progress:
        verified = verify_script(loaded, plan(loaded), run_dir, progress=progress)
    if as_json:
        print_json(fields_of(verified))
    else:
        plain_console().print(terminal_view(_section(verified)))
    return _CODES[verified.passed]


def _words(layout: VerifiedLayout) -> str:
    trial = layout.trial
    return " ".join([trial.launcher, trial.transport, trial.layout, *trial.arguments])


def _mark(layout: VerifiedLayout) -> Cell:
    text, style = _MARKS[layout.finding.passed]
    return Cell(text, style=style)


def _where(layout: VerifiedLayout) -> str:
    return "" if layout.finding.step is None else f"step {layout.finding.step + 1}"


_COLUMNS: tuple[Column[VerifiedLayout], ...] = (
    Column("", _mark, "name"),
    Column("layout", _words, "text"),
    Column("first\ndifference", _where, "name"),
    Column("what was found", lambda layout: layout.finding.reason, "text"),
)


def _section(verified: VerifiedScript) -> Section:
    """Return a line for each layout, and a sentence about all of them."""
    sentence = {
        True: "Every layout trains what one process trains.",
        False: "Not every layout trains what one process trains.",
        None: "Not every layout could be compared with one process.",
    }[verified.passed]
    return Section(table=Table(columns=_COLUMNS, items=verified.layouts), sentences=[sentence])
