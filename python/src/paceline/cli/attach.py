"""`paceline watch -- COMMAND`: record a command with its own launcher, then print a verdict."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.panel import Panel

from paceline import api, runner
from paceline.cli.console import plain_console
from paceline.cli.streams import say
from paceline.errors import PacelineError
from paceline.records.files import write_json
from paceline.report.attached import attached_section
from paceline.report.section import detail_of, terminal_view
from paceline.report.verdict import comparison_document

_WIDTH = 100  # of the box, at most
_NOT_RECORDED = (
    "nothing was recorded: expected a Python process of the command to make a step of an optimiser "
    "of torch. Its Python needs Paceline (`pip install paceline`), and reads PYTHONPATH (no -I, "
    "no -E)"
)


def attach(command: Sequence[str], out: Path | None) -> int:
    """Run and record a command; return its exit code."""
    run_dir = out or runner.default_run_dir(runner.name_of_command(command))
    say(f"records into {run_dir}")
    attached = runner.attach(command, run_dir)
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
