"""Progress on standard error: a live bar on a terminal, one line a trial elsewhere."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path
    from types import TracebackType

    from paceline.plan.trial import Trial
    from paceline.records.layout import TrialFiles
    from paceline.records.rows import Outcome

_POLL_S = 0.5


class _CountColumn(ProgressColumn):
    """`12/24 steps`, or nothing while the total is not known."""

    def render(self, task: Task) -> Text:
        if task.total is None:
            return Text("")
        return Text(f"{task.completed:.0f}/{task.total:.0f} {task.fields['unit']}")


class ConsoleProgress:
    """Shows the runner's progress; the step counter is read from rank 0's own records."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            _CountColumn(),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
        )
        self._task: TaskID | None = None
        self._label = ""
        self._watcher: _StepWatcher | None = None

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stop_watcher()
        self._bar.stop()

    def stage(self, text: str) -> None:
        self._label = text
        self._start(text, total=None, unit="")
        if not self._console.is_terminal:
            self._console.print(text, highlight=False)

    def data(self, done: int, total: int) -> None:
        if self._task is not None:
            self._bar.update(self._task, completed=done, total=total, unit="photos")

    def trial_started(self, trial: Trial, files: TrialFiles, number: int, of: int) -> None:
        self._label = f"[{number}/{of}] {trial.id}"
        self._start(self._label, total=trial.training.max_steps, unit="steps")
        self._watcher = _StepWatcher(files.rank(0).steps, self._steps)
        self._watcher.start()

    def trial_ended(self, trial: Trial, outcome: Outcome) -> None:
        del trial
        self._stop_watcher()
        seconds = outcome.ended_unix_s - outcome.launched_unix_s
        self._console.print(
            f"{self._label}  {outcome.status}  {seconds:.1f} s",
            highlight=False,
            markup=False,
            soft_wrap=True,  # a trial a line, for whoever searches the log
        )

    def _steps(self, done: int) -> None:
        if self._task is not None:
            self._bar.update(self._task, completed=done)

    def _start(self, description: str, total: int | None, unit: str) -> None:
        if self._task is not None:
            self._bar.remove_task(self._task)
        # rich reads [..] as markup
        self._task = self._bar.add_task(description.replace("[", r"\["), total=total, unit=unit)

    def _stop_watcher(self) -> None:
        if self._watcher is not None:
            self._watcher.stop()
            self._watcher = None


class _StepWatcher(threading.Thread):
    """Counts the rows of a growing file twice a second."""

    def __init__(self, path: Path, report: Callable[[int], None]) -> None:
        super().__init__(daemon=True, name="step-watcher")
        self._path = path
        self._report = report
        self._stopping = threading.Event()

    def run(self) -> None:
        rows, offset = 0, 0
        while not self._stopping.wait(_POLL_S):
            try:
                with self._path.open("rb") as file:
                    file.seek(offset)
                    new = file.read()
            except FileNotFoundError:
                continue  # the rank has not got that far
            rows += new.count(b"\n")
            offset += len(new)
            self._report(rows)

    def stop(self) -> None:
        self._stopping.set()
        self.join(timeout=5)


@contextmanager
def data_progress(unit: str) -> Iterator[Callable[[int, int], None]]:
    """A bar for work on photos; yields `report(done, total)`."""
    bar = Progress(
        BarColumn(bar_width=30),
        _CountColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    with bar:
        task = bar.add_task("", total=None, unit=unit)
        yield lambda done, total: bar.update(task, completed=done, total=total)
