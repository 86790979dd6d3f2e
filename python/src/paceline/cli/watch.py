"""`paceline watch`: show a running run in the terminal, or record a command."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from paceline.cli.attach import attach
from paceline.cli.console import plain_console
from paceline.cli.options import existing_run, or_newest, out_option, poll_seconds
from paceline.monitor.watch import watch
from paceline.records.layout import RunFiles

_COMMAND = "command"  # key of the words after `--`


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
    show_default=True,
    help="Time between two readings.",
)
@out_option("RUN_DIR", "COMMAND: write its records here; default: runs/NAME-DATE-TIME.")
@click.pass_context
def command(
    ctx: click.Context, run_dir: Path | None, once: bool, interval_s: float, out: Path | None
) -> int:  # fmt: skip
    """Show a running run in this terminal, or record a training with its own launcher.

    RUN_DIR: default: the newest run in runs/. COMMAND: runs unchanged, for example torchrun
    --nproc-per-node 2 train.py. Its training is recorded as one run without a baseline. At its end
    the verdict is printed and the report written; the exit code is that of the command.
    """
    words = ctx.meta.get(_COMMAND)
    if words is None:
        assert run_dir is not None
        return _watch(run_dir, out, once=once, interval_s=interval_s)
    if not words or run_dir is not None or once:
        raise click.UsageError("expected `paceline watch [--out RUN_DIR] -- COMMAND...`")
    return attach(words, out)


def _watch(run_dir: Path, out: Path | None, *, once: bool, interval_s: float) -> int:
    if out is not None:
        raise click.UsageError("--out: expected a command after `--`, found none; leave it out")
    with suppress(KeyboardInterrupt):  # the usual way to stop watching
        watch(RunFiles(run_dir), plain_console(), once=once, interval_s=interval_s)
    return 0
