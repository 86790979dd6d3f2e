"""Progress on standard error: a live display on a terminal, otherwise one line per trial.

The ranking below it is made between two trials, when nothing is timed. While a trial runs, only its
finished lines are written again.
"""

from __future__ import annotations

import dataclasses
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Self

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.segment import Segment
from rich.table import Column
from rich.text import Text

from paceline.analysis.compare.compute_row import planned_row
from paceline.analysis.compare.row import full_name, short_name
from paceline.analysis.compare.run import Comparison, compare_run
from paceline.analysis.trial_analysis import TrialAnalysis
from paceline.base.errors import PacelineError
from paceline.cli.console import plain_console
from paceline.measure.records.files import LineTail
from paceline.measure.records.layout import RunFiles, TrialFiles
from paceline.plan.trials.trial import Trial
from paceline.runner.trials.preview import duration
from paceline.show.report.table import ranking_view

if TYPE_CHECKING:
    from paceline.measure.records.layout import RunFiles
    from paceline.measure.records.rows import Outcome
    from paceline.plan.trials.trial import Trial

_POLL_S = 0.5
_REFRESHES_PER_S = 2.0  # each takes some milliseconds of a core, which the trial needs
# Short: a terminal that echoes ^C behind a full line would begin another one.
_HINT = "Ctrl-C stops; the run can be continued."


class _CountColumn(ProgressColumn):
    """Show `12/24 steps`, or nothing while the total is unknown."""

    def render(self, task: Task) -> Text:
        if task.total is None:
            return Text("")
        return Text(f"{task.completed:.0f}/{task.total:.0f} {task.fields['unit']}")


def _bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=None, table_column=Column(max_width=20)),
        _CountColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_interactive,  # it would print an empty line
    )


class ConsoleProgress:
    """Show the runner's progress. The step counter is read from the records of rank 0.

    On a terminal a run with a plan also has its ranking, which is drawn by a thread: a signal
    interrupts the main thread only, so never a line that is half written.
    """

    def __init__(self, *, quiet: bool = False, verbose: bool = False) -> None:
        """Show nothing but failed trials if quiet, also the logs of trials if verbose."""
        self._quiet, self._verbose = quiet, verbose
        self._console = plain_console(stderr=True)
        self._is_live = self._console.is_interactive and not quiet
        self._bar = _bar(self._console)
        self._ranking: LiveRanking | None = None
        self._live = Live(
            console=self._console,
            get_renderable=self._display,
            refresh_per_second=_REFRESHES_PER_S,
            transient=True,
        )
        self._task: TaskID | None = None
        self._label = ""
        self._watcher: _StepWatcher | None = None
        self._files: TrialFiles | None = None  # of the trial that runs
        self._names_made = not quiet  # once, where the new files of a script are

    def __enter__(self) -> Self:
        if self._is_live:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._stop_watcher()
        self._live.stop()
        if kind is not None and self._ranking is not None and self._ranking.table:
            self._console.print(self._ranking.table)  # no other one follows

    def stage(self, text: str) -> None:
        self._label = text
        self._start(text, total=None, unit="")
        if not (self._console.is_interactive or self._quiet):
            self._console.print(text)

    def planned(
        self, summary: str, trials: Sequence[Trial], expected_s: Mapping[str, float]
    ) -> None:
        if self._is_live:
            # Other commands show progress without the analysis.
            from paceline.cli.progress import LiveRanking  # noqa: PLC0415

            self._ranking = LiveRanking(trials, expected_s)
        if not self._quiet:
            self._console.print(summary, soft_wrap=not self._is_live)  # a log has it in one line

    def data(self, done: int, total: int) -> None:
        if self._task is not None:
            self._bar.update(self._task, completed=done, total=total, unit="images")

    def trial_started(self, trial: Trial, files: TrialFiles, number: int, of: int) -> None:
        self._label = f"[{number}/{of}] {trial.id}"
        shown = self._label
        if self._ranking is not None:
            self._ranking.started(trial)
            shown = self._ranking.name(trial)
        self._start(shown, total=trial.training.max_steps, unit="steps")
        if self._verbose:
            self._console.print(f"{self._label}  log: {files.launcher_log}", soft_wrap=True)
        self._files = files
        self._watcher = _StepWatcher(files.rank(0).steps, self._steps)
        self._watcher.start()

    def trial_ended(self, trial: Trial, outcome: Outcome) -> None:
        del trial
        self._stop_watcher()
        self._name_made()
        is_good = outcome.status == "ok"
        if is_good and (self._quiet or (self._ranking is not None and not self._verbose)):
            return
        seconds = outcome.ended_unix_s - outcome.launched_unix_s
        self._console.print(
            f"{self._label}  {outcome.status}  {seconds:.1f} s",
            soft_wrap=True,  # one line per trial, so that a log can be searched
        )
        if not is_good:
            self._console.print(f"  {outcome.reason}", soft_wrap=True)

    def _name_made(self) -> None:
        if self._files is None or not (self._names_made and self._files.made.exists()):
            return
        self._names_made = False
        run = self._files.root.parents[1]
        self._console.print(
            f"the script's new files are moved into {run}/trials/*/made, so that each trial starts "
            "anew",
            soft_wrap=True,
        )

    def between_trials(self, run: RunFiles) -> None:
        if self._ranking is not None:
            self._ranking.look(run, self._console.width)

    def _display(self) -> RenderableType:
        if self._ranking is None:
            return self._bar
        hint = Text(_HINT, style="dim")
        return Group(self._ranking.state(), self._bar, "", self._ranking.table, hint)

    def _steps(self, done: int) -> None:
        if self._task is not None:
            self._bar.update(self._task, completed=done)

    def _start(self, description: str, total: int | None, unit: str) -> None:
        before, self._task = self._task, self._bar.add_task(description, total=total, unit=unit)
        if before is not None:
            self._bar.remove_task(before)

    def _stop_watcher(self) -> None:
        if self._watcher is not None:
            self._watcher.stop()
            self._watcher = None


class _StepWatcher(threading.Thread):
    """Count the rows of a growing file twice a second."""

    def __init__(self, path: Path, report: Callable[[int], None]) -> None:
        super().__init__(daemon=True, name="step-watcher")
        self._path = path
        self._report = report
        self._stopping = threading.Event()

    def run(self) -> None:
        tail, rows = LineTail(self._path), 0
        while not self._stopping.wait(_POLL_S):
            if tail.was_replaced():
                tail.rewind()
                rows = 0
            with suppress(OSError):  # a restart may move the file between the two calls
                rows += sum(1 for _ in tail.lines(to_the_end=True))
            self._report(rows)

    def stop(self) -> None:
        self._stopping.set()
        self.join(timeout=5)


@contextmanager
def data_progress(unit: str) -> Iterator[Callable[[int, int], None]]:
    """Show a bar for work on images; yield `report(done, total)`."""
    with _bar(plain_console(stderr=True)) as bar:
        task = bar.add_task("", total=None, unit=unit)
        yield lambda done, total: bar.update(task, completed=done, total=total)


_MOST_SHARE = 0.05  # of the time of a run, for the analysis of what has finished
# Of the display: state, running trial, empty ones, the line that was cut, the hint.
_OTHER_LINES = 6


class LiveRanking:
    """The ranking of the finished trials, and the expected time of those that have not run."""

    def __init__(self, trials: Sequence[Trial], expected_s: Mapping[str, float]) -> None:
        """trials: all of the run, in order. expected_s: of a repeat, by configuration."""
        self._trials = trials
        self._rows = list({t.configuration: planned_row(t) for t in trials}.values())
        self._expected_s = dict(expected_s)
        self._spent_s: dict[str, list[float]] = {}
        self._waiting: Sequence[Trial] = trials
        self._running: Trial | None = None
        self._began_s = self._started_s = time.monotonic()
        self._analysis_s = 0.0
        self._analysed: dict[str, TrialAnalysis] = {}
        self.table: RenderableType = ""

    def name(self, trial: Trial) -> str:
        """Return the short name of a trial's configuration, and its repeat, counted from 1.

        It has the workload if the run has several.
        """
        row = next(row for row in self._rows if row.configuration == trial.configuration)
        again = " again" if trial.is_again else ""
        has_several = len({row.workload for row in self._rows}) > 1
        name = full_name if has_several else short_name
        return f"{name(row, self._rows)}, repeat {trial.planned_repeat + 1}{again}"

    def started(self, trial: Trial) -> None:
        """Take the time of a trial and of the work after it."""
        self._running, self._started_s = trial, time.monotonic()

    def look(self, run: RunFiles, width: int) -> None:
        """Rank what has finished, for a terminal of so many columns.

        Skips the analysis if the looks before took more than their share of the run. A run goes on
        whatever is wrong with the files of a trial; the comparison at its end says so.
        """
        now_s = time.monotonic()
        if self._running is not None:
            times_s = self._spent_s.setdefault(self._running.configuration, [])
            times_s.append(now_s - self._started_s)
            self._running = None
        self._waiting = [t for t in self._trials if not run.trial(t.id).outcome.exists()]
        if self._analysis_s > _MOST_SHARE * (now_s - self._began_s):
            return
        try:
            comparison = compare_run(run, analysed=self._analysed)
        except PacelineError:  # nothing has finished, or a file is damaged
            return
        shown = with_waiting(comparison, self._trials)
        self.table = _Frozen(ranking_view(shown, width))
        self._analysis_s += time.monotonic() - now_s

    def state(self) -> Text:
        """Say how many trials are done, and how long the others will take."""
        done = len(self._trials) - len(self._waiting)
        words = f"{done} of {len(self._trials)} trials done"
        left_s = self._left_s()
        return Text(words if left_s is None else f"{words}, about {duration(left_s)} left")

    def _left_s(self) -> float | None:
        """Return the expected time of the trials that have not ended; None if none is known."""
        known_s = self._expected_s | {
            name: statistics.median(times_s) for name, times_s in self._spent_s.items()
        }
        if not known_s:
            return None
        usual_s = statistics.mean(known_s.values())
        left_s = sum(known_s.get(trial.configuration, usual_s) for trial in self._waiting)
        if self._running is not None:
            left_s -= min(time.monotonic() - self._started_s, left_s)
        return left_s


def with_waiting(comparison: Comparison, trials: Sequence[Trial]) -> Comparison:
    """Add a row without measurements for each configuration of which no trial has ended."""
    known = {row.configuration for row in comparison.rows}
    waiting = {
        trial.configuration: planned_row(trial)
        for trial in trials
        if trial.configuration not in known and trial.training.workload in comparison.verdicts
    }
    return dataclasses.replace(comparison, rows=(*comparison.rows, *waiting.values()))


class _Frozen:
    """Something that is laid out once, not at every refresh of the terminal.

    Lines for which the terminal has no room are left out.
    """

    def __init__(self, content: RenderableType) -> None:
        self._content = content
        self._lines: list[list[Segment]] | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self._lines is None:
            self._lines = console.render_lines(self._content, options, pad=False)
        room = max(1, options.size.height - _OTHER_LINES)
        for line in self._lines[:room]:
            yield from line
            yield Segment.line()
        if len(self._lines) > room:
            yield Text(f"… {len(self._lines) - room} more lines", style="dim")
