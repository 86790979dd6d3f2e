"""`paceline stacks`: where the ranks of a running trial are."""

from __future__ import annotations

from pathlib import Path

import click

from paceline.base.errors import ExitCode, NotComparable
from paceline.cli.console import plain_console, print_json
from paceline.cli.options import json_option, run_dir_argument
from paceline.measure.records.documents import read_statuses
from paceline.measure.records.layout import RunFiles, TrialFiles
from paceline.runner.job.stacks import RankStack, read_stacks, request_stacks, stacks_sentence

_FRAMES = 8  # of each rank on the terminal


@click.command("stacks")
@run_dir_argument
@json_option
def command(run_dir: Path, as_json: bool) -> int:
    """Show where the ranks of a running trial are.

    The output also names the operation that they wait for, and the ranks that have not begun it.
    Ranks of other hosts answer through the sidecar there; without one they show their last
    operations only. RUN_DIR is the newest run in runs/ by default.
    """
    files = _running(RunFiles(run_dir))
    request_stacks(files, elsewhere=True)
    stacks = read_stacks(files)
    if as_json:
        print_json({"trial": files.root.name, "ranks": stacks})
        return ExitCode.OK
    console = plain_console()
    for stack in stacks:
        console.print(f"rank {stack.rank} on {stack.host}")
        for line in _lines(stack):
            console.print(f"  {line}", soft_wrap=True)
    console.print(stacks_sentence(stacks) or "No rank has written its stack.")
    return ExitCode.OK


def _running(run: RunFiles) -> TrialFiles:
    """Return the trial whose ranks run. Raises NotComparable if there is none."""
    for _, files in run.trials():
        if any(s.state == "running" for s in read_statuses(files)) and not files.outcome.exists():
            return files
    raise NotComparable(f"{run.root}: expected a trial that runs, found none")


def _lines(stack: RankStack) -> list[str]:
    lines = [str(frame) for frame in stack.frames[:_FRAMES]]
    if len(stack.frames) > _FRAMES:
        lines.append(f"and {len(stack.frames) - _FRAMES} more calls")
    for each in stack.operations:
        state = "pending" if each.pending else "done"
        lines.append(f"{each.operation} {each.sequence} of {each.group}: {state}")
    return lines
