"""`paceline watch`: show a running run in the terminal, or record a command."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import click
from rich.panel import Panel

from paceline import api
from paceline.base.errors import PacelineError
from paceline.base.host.messages import say
from paceline.cli.console import plain_console
from paceline.cli.options import existing_run, or_newest, out_option, poll_seconds
from paceline.measure.records.files import write_json
from paceline.measure.records.layout import RunFiles
from paceline.runner.trials.attach import attach, name_of_command
from paceline.runner.trials.directory import default_run_dir
from paceline.show.monitor.watch import watch
from paceline.show.report.profile import attached_section
from paceline.show.report.section import detail_of, terminal_view
from paceline.show.report.verdict import comparison_document

_COMMAND = "command"  # key of the words after `--`
_WIDTH = 100  # of the box, at most
_NOT_RECORDED = (
    "nothing was recorded: expected a Python process of the command to make a step of an optimiser "
    "of torch. Paceline must be installed in its Python, which reads PYTHONPATH (no -I, no -E). "
    "Ranks that torch.multiprocessing starts are not recorded: use torchrun, or `paceline run`"
)


class _WatchCommand(click.Command):
    """Keeps the words after `--`, which click would take for a run directory."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if "--" in args:
            place = args.index("--")
            args, ctx.meta[_COMMAND] = args[:place], args[place + 1 :]
        return super().parse_args(ctx, args)


def _run_dir(ctx: click.Context, parameter: click.Parameter, value: Any) -> Any:
    return value if _COMMAND in ctx.meta else or_newest(ctx, parameter, value)


@click.command("watch", cls=_WatchCommand)
@click.argument(
    "run_dir",
    type=existing_run,
    metavar="[RUN_DIR | -- COMMAND...]",
    required=False,
    callback=_run_dir,
)
@click.option("--once", is_flag=True, help="Print once and exit.")
@click.option(
    "--interval",
    "interval_s",
    metavar="SECONDS",
    type=poll_seconds,
    default=1.0,
    help="Time between two readings.",
)
@out_option("RUN_DIR", "COMMAND: write its records here; default: runs/NAME-DATE-TIME.")
@click.pass_context
def command(
    ctx: click.Context, run_dir: Path | None, once: bool, interval_s: float, out: Path | None
) -> int:  # fmt: skip
    """Show a running run in this terminal, or record a training with its own launcher.

    RUN_DIR is the newest run in runs/ by default. COMMAND runs unchanged, for example torchrun
    --nproc-per-node 2 train.py. Its training is recorded as one run without a baseline. At its end
    the verdict is printed and the report written; the exit code is that of the command.
    """
    words = ctx.meta.get(_COMMAND)
    if words is None:
        assert run_dir is not None
        return _watch(run_dir, out, once=once, interval_s=interval_s)
    if not words or run_dir is not None or once:
        raise click.UsageError("expected `paceline watch [--out RUN_DIR] -- COMMAND...`")
    return _record(words, out)


def _watch(run_dir: Path, out: Path | None, *, once: bool, interval_s: float) -> int:
    if out is not None:
        raise click.UsageError("--out: expected a command after `--`, found none; leave it out")
    with suppress(KeyboardInterrupt):  # the usual way to stop watching
        watch(RunFiles(run_dir), plain_console(), once=once, interval_s=interval_s)
    return 0


def _record(command: Sequence[str], out: Path | None) -> int:
    """Run and record a command; return its exit code."""
    run_dir = out or default_run_dir(name_of_command(command))
    say(f"records into {run_dir}")
    attached = attach(command, run_dir)
    if not attached.trained:
        say(_NOT_RECORDED)
        return attached.exit_code
    try:
        _show(api.Run(run_dir))
    except PacelineError as error:  # the exit code is that of the command
        say(str(error))
    return attached.exit_code


def _show(run: api.Run) -> None:
    """Print the verdict in a box, and write comparison and report."""
    comparison = run.comparison
    write_json(run.files.comparison, comparison_document(comparison))
    console = plain_console()
    view = terminal_view(attached_section(comparison), detail_of(console.width))
    console.print(Panel(view, title=comparison.experiment, width=min(console.width, _WIDTH)))
    console.print(f"report: {run.to_html()}", soft_wrap=True)
