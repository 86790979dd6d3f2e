"""The ranking that `paceline run` shows in a terminal while it goes on.

It is made between two trials, when nothing is timed. While a trial runs, only its finished lines
are written again.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Mapping, Sequence

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.segment import Segment
from rich.text import Text

from paceline.analysis.compare.compute_row import planned_row
from paceline.analysis.compare.row import short_name
from paceline.analysis.compare.run import Comparison, compare_run
from paceline.analysis.trial_analysis import TrialAnalysis
from paceline.base.errors import PacelineError
from paceline.measure.records.layout import RunFiles
from paceline.plan.trials.trial import Trial
from paceline.runner.trials.preview import duration
from paceline.show.report.table import ranking_view

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
        """Return the short name of a trial's configuration, and its repeat, counted from 1."""
        row = next(row for row in self._rows if row.configuration == trial.configuration)
        again = " again" if trial.is_again else ""
        return f"{short_name(row, self._rows)}, repeat {trial.planned_repeat + 1}{again}"

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
