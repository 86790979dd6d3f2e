"""`paceline watch`: show a running run in a terminal or line by line. Files are only read."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from rich.live import Live

from paceline.errors import DataError, TimedOut
from paceline.monitor.follow import RunFollower
from paceline.monitor.screen import plain_line, screen

if TYPE_CHECKING:
    from rich.console import Console

    from paceline.monitor.views import RunView
    from paceline.records.layout import RunFiles

_BEGIN_LIMIT_S = 600.0  # until the run directory exists: images are synthesised before
_IDLE_LIMIT_S = 600.0  # between trials: synthesising images, checking tensors


def watch(run: RunFiles, console: Console, *, once: bool, interval_s: float) -> None:
    """Show `run` until it has ended; with `once`, print it once and return.

    A console that is not a terminal gets one line per interval. Raises DataError if there is no
    run, TimedOut if it makes no progress for as long as its own limits allow.
    """
    if once:
        _must_be_there(run)
        view = RunFollower(run).look()
        console.print(screen(view, console.width, console.height))
        return
    _await_beginning(run, console)
    follower = RunFollower(run)
    if not console.is_terminal:
        view = _follow_lines(follower, run, console, interval_s)
    else:
        view = _follow_live(follower, run, console, interval_s)
    console.print(_last_words(view, run), highlight=False, markup=False, soft_wrap=True)


def _follow_lines(
    follower: RunFollower, run: RunFiles, console: Console, interval_s: float
) -> RunView:
    while not (view := follower.look()).ended:
        console.print(plain_line(view), highlight=False, markup=False, soft_wrap=True)
        _check_alive(follower, run)
        time.sleep(interval_s)
    return view


def _follow_live(
    follower: RunFollower, run: RunFiles, console: Console, interval_s: float
) -> RunView:
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        while not (view := follower.look()).ended:
            live.update(screen(view, console.width, console.height), refresh=True)
            _check_alive(follower, run)
            time.sleep(interval_s)
        live.update(screen(view, console.width, console.height), refresh=True)
    return view


def _last_words(view: RunView, run: RunFiles) -> str:
    failed = f", {view.failed} failed" if view.failed else ""
    report = f"; report: {run.report}" if run.report.exists() else ""
    trials = "trial" if view.done == 1 else "trials"
    return f"the run has ended: {view.done} {trials} done{failed}{report}"


def _must_be_there(run: RunFiles) -> None:
    if not _is_there(run):
        raise DataError(
            f"{run.root}: expected a run directory, found no {run.manifest.name} and no trials; "
            "`paceline run` makes one and prints its name"
        )


def _is_there(run: RunFiles) -> bool:
    return run.manifest.exists() or run.tune.manifest.exists() or any(run.trials())


def _await_beginning(run: RunFiles, console: Console) -> None:
    """Wait for the run directory: a run synthesises its images before it creates it."""
    give_up_s = time.monotonic() + _BEGIN_LIMIT_S
    if not _is_there(run):
        console.print(f"waiting up to {_BEGIN_LIMIT_S:.0f} s for a run in {run.root}")
    while not _is_there(run) and time.monotonic() < give_up_s:
        time.sleep(0.5)
    _must_be_there(run)


def _check_alive(follower: RunFollower, run: RunFiles) -> None:
    trial = follower.trial
    limit_s = _IDLE_LIMIT_S if trial is None else max(_IDLE_LIMIT_S, trial.limits.trial_s)
    if follower.quiet_s > limit_s:
        raise TimedOut(
            f"{run.root}: expected progress within {limit_s:.0f} s, there was none; has `paceline "
            f"run` died? `paceline run --resume {run.root}` completes it"
        )
