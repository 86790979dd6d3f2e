"""`paceline watch`: show a running run in a terminal or line by line. Files are only read."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from paceline.analysis.trial.host_frames import host_frame
from paceline.analysis.trial.reading import (
    HostTrace,
    RankRecord,
    TrialRecord,
    load_manifest,
    read_trial,
)
from paceline.analysis.trial.steps import global_steps, rank_steps
from paceline.base.errors import DataError, TimedOut
from paceline.measure.records.documents import has_writer, read_stopping
from paceline.measure.records.files import LineTail, document, json_row
from paceline.measure.records.layout import RunFiles, TrialFiles
from paceline.measure.records.rows import Outcome, RankEnvironment, StepRow
from paceline.measure.records.tables import HOST_SAMPLES, frame_of
from paceline.plan.trials.trial import Trial

# --- follow the files of a running run. Reading files does not disturb the run -------------------

_STEPS = 120  # of each rank, of which some may be far ahead
_RECENT_STEPS = 20  # for the speed
_SAMPLES = 2  # of each host: rates are of the last tick
_SETTLED_S = 5.0  # without a new trial, if no closing document shows that the run has ended


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialView:
    """State of the running trial."""

    trial_id: str
    number: int | None  # as planned, from 1
    steps: int  # that every rank has ended
    steps_planned: int | None
    samples_per_s: float | None  # over the last steps
    loss: float | None  # of the last step
    cpu: Mapping[str, Mapping[str, float]]  # percentages of the last sample, by host


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """A whole run directory."""

    name: str
    stage: str  # "tune" while the search before the trials goes on, else ""
    planned: int | None
    done: int
    failed: int
    elapsed_s: float | None
    trial: TrialView | None
    ended: bool
    message: str | None  # of the trial that failed last


class _Rows:
    """The newest rows of a file of JSON lines that another process is writing.

    The file may appear later or be replaced; then it is read from its beginning.
    """

    def __init__(self, path: Path, newest: int) -> None:
        self.rows: deque[dict[str, Any]] = deque(maxlen=newest)
        self.path = path
        self._lines = LineTail(path)

    def read(self) -> bool:
        """Read complete new rows; return whether there were any. Raises DataError for a bad row."""
        if self._lines.was_replaced():
            self._lines.rewind()
        try:
            lines = deque(self._lines.lines(to_the_end=True), maxlen=self.rows.maxlen)
        except FileNotFoundError:
            return False  # moved aside just now
        self.rows.extend(json_row(line, str(self.path)) for line in lines)
        return bool(lines)


class TrialFollower:
    """Files of one trial; each call continues where the last one stopped."""

    def __init__(self, files: TrialFiles) -> None:
        self.trial: Trial = read_trial(files)
        self._files = files
        self._steps: dict[int, _Rows] = {}  # by rank
        self._environments: dict[int, RankEnvironment | None] = {}
        self._traces: dict[str, _Rows] = {}  # by host

    def read(self) -> bool:
        """Read new rows; return whether there were any. Raises DataError if a row is damaged."""
        for rank, rank_files in self._files.ranks():
            self._steps.setdefault(rank, _Rows(rank_files.steps, _STEPS))
            if self._environments.get(rank) is None:
                self._environments[rank] = document(rank_files.environment, RankEnvironment)
        for host, host_files in self._files.hosts():
            self._traces.setdefault(host, _Rows(host_files.trace, _SAMPLES))
        new = [rows.read() for rows in (*self._steps.values(), *self._traces.values())]
        return any(new)

    def view(self, number: int | None) -> TrialView:
        steps, speed, loss = self._progress()
        return TrialView(
            trial_id=self.trial.id,
            number=number,
            steps=steps,
            steps_planned=self.trial.training.max_steps,
            samples_per_s=speed,
            loss=loss,
            cpu={name: cpu for name in self._traces if (cpu := self._cpu(name))},
        )

    def _cpu(self, host: str) -> dict[str, float]:
        """Return the CPU shares of the last tick; empty before the second sample."""
        trace = self._traces[host]
        rows = [row for row in trace.rows if "unix_s" in row]
        samples = frame_of(rows, HOST_SAMPLES, trace.path)
        if samples.is_empty():
            return {}
        frame = host_frame(HostTrace(host=host, header={}, samples=samples))
        last = frame.row(-1, named=True)
        named = {name: last.get(f"cpu_{name}_percent") for name in ("busy", "idle", "iowait")}
        return {name: value for name, value in named.items() if value is not None}

    def _progress(self) -> tuple[int, float | None, float | None]:
        """Return steps, samples per second and loss; steps are incomplete until all ranks began."""
        if len(self._steps) < self.trial.placement.ranks:
            return 0, None, None
        ranks = [
            RankRecord(rank=rank, spans=(), environment=environment, status=None)
            for rank, environment in sorted(self._environments.items())
        ]
        record = TrialRecord(
            trial=self.trial, files=self._files, outcome=None, result=None, ranks=tuple(ranks),
            command=None,
        )  # fmt: skip
        frames = {
            rank: frame_of(list(found.rows), StepRow, found.path)
            for rank, found in self._steps.items()
        }
        steps = global_steps(record, rank_steps(record, frames))
        if not len(steps.step):
            return 0, None, None
        recent = steps.steady.nonzero()[0][-_RECENT_STEPS:]
        time_s = float(steps.time_s[recent].sum())
        is_known = steps.samples_known and time_s > 0
        speed = float(steps.samples[recent].sum()) / time_s if is_known else None
        loss = float(steps.loss[-1])
        return int(steps.step[-1]) + 1, speed, None if math.isnan(loss) else loss


class RunFollower:
    """Run directory; each call of `look` reads what is new."""

    def __init__(self, run: RunFiles) -> None:
        self._run = run
        self._trial: TrialFollower | None = None
        self._trial_written: tuple[str, int, int] | None = None
        self._last_news_s = time.monotonic()
        self._counts: tuple[int, int] = (0, 0)

    @property
    def quiet_s(self) -> float:
        """Seconds since the last new row or file."""
        return time.monotonic() - self._last_news_s

    @property
    def trial(self) -> Trial | None:
        """The trial that is running."""
        return None if self._trial is None else self._trial.trial

    def look(self) -> RunView:
        """Read new rows and files and return the state. Raises DataError if a file is damaged."""
        run = self._stage()
        manifest = load_manifest(run)
        found = dict(run.trials())
        outcomes = {name: document(files.outcome, Outcome) for name, files in found.items()}
        ended = [o for o in outcomes.values() if o is not None]
        failed = [o for o in ended if o.status != "ok"]
        planned: list[str] = manifest.get("trials", [])
        running = [files for name, files in found.items() if outcomes[name] is None]
        number = self._follow(max(running, key=_written_ns, default=None), planned)
        if (len(found), len(ended)) != self._counts:
            self._counts = (len(found), len(ended))
            self._last_news_s = time.monotonic()
        is_over = (
            run is self._run
            and _has_ended(run, planned, outcomes)
            # a search plans as it goes: its next trial starts at once
            and (run.tuning.exists() or run.comparison.exists() or self.quiet_s > _SETTLED_S)
        )
        last_unix_s = max((o.ended_unix_s for o in ended), default=None) if is_over else None
        return RunView(
            name=manifest.get("name") or self._run.root.resolve().name,
            stage="" if run is self._run else "tune",
            planned=len({*planned, *found}) if planned else None,
            done=len(ended) - len(failed),
            failed=len(failed),
            elapsed_s=_elapsed_s(manifest, last_unix_s),
            trial=None if self._trial is None else self._trial.view(number),
            ended=is_over,
            message=max(failed, key=lambda o: o.ended_unix_s).message if failed else None,
        )

    def _stage(self) -> RunFiles:
        """Return the directory of the search until the trials begin."""
        begun = self._run.manifest.exists() or any(self._run.trials())
        return self._run if begun or not self._run.tune.manifest.exists() else self._run.tune

    def _follow(self, files: TrialFiles | None, planned: list[str]) -> int | None:
        """Follow another trial, or a repeated one; return its number in the plan."""
        try:
            written = None if files is None else _identity(files)
            if written != self._trial_written:
                self._trial = None if files is None else TrialFollower(files)
                self._trial_written = written
            if self._trial is not None and self._trial.read():
                self._last_news_s = time.monotonic()
        except (DataError, FileNotFoundError):
            if files is not None and files.trial.exists():
                raise
            self._trial = self._trial_written = None  # it was just moved aside, to be repeated
        name = None if self._trial is None else self._trial.trial.id
        return planned.index(name) + 1 if name in planned else None


def _written_ns(files: TrialFiles) -> int:
    try:
        return files.trial.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def _identity(files: TrialFiles) -> tuple[str, int, int]:
    """Identify this attempt at a trial: it differs from that of a repetition."""
    status = files.trial.stat()
    return str(files.trial), status.st_ino, status.st_mtime_ns


def _elapsed_s(manifest: dict[str, Any], last_unix_s: float | None) -> float | None:
    """Return the duration until now, or until the end of the last trial of an ended run."""
    created = manifest.get("created_unix_s")
    until = time.time() if last_unix_s is None else last_unix_s
    return None if created is None else max(0.0, until - created)


def _has_ended(run: RunFiles, planned: list[str], outcomes: dict[str, Outcome | None]) -> bool:
    """Return whether the run has ended: no trial is left, or it stopped before.

    A run stops at a failed trial, or if `repeats = "auto"` needs no further repeat.
    """
    if run.tuning.exists():
        return True
    if not outcomes or None in outcomes.values() or has_writer(run):
        return False
    failed = any(o is not None and o.status != "ok" for o in outcomes.values())
    stopping = read_stopping(run)
    stopped = stopping is not None and stopping.stopped is not None
    return failed or stopped or set(planned) <= set(outcomes)


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
