"""`paceline watch`: show a running run in a terminal or line by line. Files are only read."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.live import Live
from rich.text import Text

from paceline.base.errors import DataError, TimedOut
from paceline.measure.records.layout import RunFiles
from paceline.show.monitor.follow import RunFollower, RunView, TrialView

_BEGIN_LIMIT_S = 600.0  # until the run directory exists: images are synthesised before
_IDLE_LIMIT_S = 600.0  # between trials: synthesising images, checking tensors

_CPU_NAMES = {"busy": "CPU", "idle": "idle", "iowait": "IOWait"}


def watch(run: RunFiles, console: Console, *, once: bool, interval_s: float) -> None:
    """Show `run` until it has ended; with `once`, print it once and return.

    A console that is not a terminal gets one line per interval. Raises DataError if there is no
    run, TimedOut if it makes no progress for as long as its own limits allow.
    """
    if once:
        _must_be_there(run)
        console.print(_screen(RunFollower(run).look()))
        return
    _await_beginning(run, console)
    if console.is_terminal:
        with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
            view = _follow(run, interval_s, lambda view: live.update(_screen(view), refresh=True))
            live.update(_screen(view), refresh=True)
    else:
        view = _follow(run, interval_s, lambda view: _print(console, "  ".join(view_lines(view))))
    _print(console, _last_words(view, run))


def _follow(run: RunFiles, interval_s: float, show: Callable[[RunView], None]) -> RunView:
    """Show each view; return that of the ended run."""
    follower = RunFollower(run)
    while not (view := follower.look()).ended:
        show(view)
        _check_alive(follower, run)
        time.sleep(interval_s)
    return view


def _print(console: Console, line: str) -> None:
    console.print(line, highlight=False, markup=False, soft_wrap=True)


def view_lines(view: RunView) -> Iterator[str]:
    """Yield the state of a run in a few lines, which leave out what is not known."""
    name = f"{view.name} ({view.stage})" if view.stage else view.name
    planned = "" if view.planned is None else f" of {view.planned}"
    failed = f", {view.failed} failed" if view.failed else ""
    elapsed = "" if view.elapsed_s is None else f", {_clock(view.elapsed_s)}"
    yield f"{name}: {view.done}{planned} done{failed}{elapsed}"
    if view.trial is not None:
        yield from _trial_lines(view.trial)
    elif not view.ended:
        started = view.done + view.failed
        yield f"waiting for the {'next' if started else 'first'} trial"
    if view.message is not None:
        yield f"failed: {view.message}"


def _trial_lines(trial: TrialView) -> Iterator[str]:
    yield trial.trial_id if trial.number is None else f"trial {trial.number}: {trial.trial_id}"
    planned = "" if trial.steps_planned is None else f"/{trial.steps_planned}"
    speed = "" if trial.samples_per_s is None else f", {trial.samples_per_s:.4g} samples/s"
    loss = "" if trial.loss is None else f", loss {trial.loss:.4g}"
    yield f"step {trial.steps}{planned}{speed}{loss}"
    for host, cpu in trial.cpu.items():
        parts = [f"{_CPU_NAMES[part]} {percent:.0f}%" for part, percent in cpu.items()]
        yield f"{host}: {', '.join(parts)}"


def _screen(view: RunView) -> Text:
    return Text("\n".join(view_lines(view)), no_wrap=True, overflow="ellipsis")


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


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
