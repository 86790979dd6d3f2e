"""The live ranking: its rows are those of the final table, and the terminal is left clean."""

from __future__ import annotations

import dataclasses
import io
import shutil
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from rich.text import Text
from tests.support.rows import ENDED_WELL
from tests.support.terminal import Screen
from tests.unit.analysis import fabricate

from paceline.analysis.compare.run import compare_run
from paceline.cli.progress import ConsoleProgress, LiveRanking
from paceline.measure.records.layout import RunFiles
from paceline.measure.records.rows import Outcome
from paceline.plan.trials.trial import Trial
from paceline.show.report.table import comparison_text

WIDTHS = (80, 120)


class Watched:
    """A run whose trials end one after the other."""

    def __init__(self, folder: Path, repeats: int = 2) -> None:
        ways = [fabricate.SEQUENTIAL, fabricate.INTRAOP, fabricate.PIPELINE, fabricate.MPI]
        self.whole = fabricate.make_run(folder / "whole", ways, repeats=repeats, jitter=0.01)
        self.trials: list[Trial] = [
            fabricate.make_trial_value(way, repeat=repeat)
            for repeat in range(repeats)
            for way in ways
        ]
        self.run = RunFiles(folder / "run")
        self.run.root.mkdir()

    def end(self, trials: Sequence[Trial]) -> None:
        for trial in trials:
            shutil.copytree(self.whole.trial(trial.id).root, self.run.trial(trial.id).root)


@pytest.fixture
def watched(tmp_path: Path) -> Watched:
    return Watched(tmp_path)


@pytest.fixture(autouse=True)
def _unlimited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.cli.progress._MOST_SHARE", 1e9)


def shown(live: LiveRanking, width: int, height: int = 60) -> list[str]:
    console = Console(file=io.StringIO(), width=width, height=height, no_color=True)
    with console.capture() as captured:
        console.print(live.table)
    return [line.rstrip() for line in captured.get().splitlines()]


def look(live: LiveRanking, watched: Watched, width: int = 80) -> list[str]:
    live.look(watched.run, width)
    return shown(live, width)


@pytest.mark.parametrize("width", WIDTHS)
def test_rows_of_the_whole_run_are_those_of_the_final_table(watched: Watched, width: int) -> None:
    watched.end(watched.trials)
    lines = look(LiveRanking(watched.trials, {}), watched, width)
    final = comparison_text(compare_run(watched.run), width).splitlines()
    rows = [line for line in final if line.endswith("✓")]
    assert len(rows) == 4
    for row in rows:
        (line,) = [each for each in lines if each.startswith(row)]
        assert set(line.removeprefix(row).strip()) <= {"█", "▒"}
        assert "█" in line
    assert max(map(len, lines)) <= width


def test_a_longer_bar_is_a_larger_speedup(watched: Watched) -> None:
    watched.end(watched.trials)
    lines = [line for line in look(LiveRanking(watched.trials, {}), watched, 100) if "█" in line]
    lengths = [line.count("█") + line.count("▒") for line in lines]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] > lengths[-1] > 0
    assert "▒" in lines[0]
    assert "▒" not in next(line for line in lines if "(base)" in line)


def test_configurations_that_wait_have_rows_without_figures(watched: Watched) -> None:
    live = LiveRanking(watched.trials, {})
    assert look(live, watched) == [""]
    watched.end(watched.trials[:1])
    lines = look(live, watched)
    assert sum(" mpi " in line for line in lines) == 1
    waiting = next(line for line in lines if " mpi " in line)
    assert waiting.split()[:2] == ["\u2013", "\u2013"]
    assert waiting.endswith("\u2013")
    watched.end(watched.trials[1:4])
    assert not any(line.startswith("\u2013") for line in look(live, watched))


def test_a_missed_target_is_not_that_of_a_configuration_that_waits(tmp_path) -> None:
    target = fabricate.Target(metric="accuracy", at_least=0.6)
    case = fabricate.Case(evaluate_every_steps=2, target=target)
    run = fabricate.make_run(tmp_path, [fabricate.SEQUENTIAL], cases=[case], repeats=2)
    ways = (fabricate.SEQUENTIAL, fabricate.MPI)
    trials = [fabricate.make_trial_value(way, case) for way in ways]
    live = LiveRanking(trials, {})
    live.look(run, 80)
    assert any(
        line.startswith("\u2013") and " mpi " in line
        for line in (s.lstrip() for s in shown(live, 80))
    )


def test_small_terminal_shows_the_fastest_ones(watched: Watched) -> None:
    watched.end(watched.trials)
    live = LiveRanking(watched.trials, {})
    whole = look(live, watched)
    assert shown(live, 80, height=10) == [*whole[:4], f"… {len(whole) - 4} more lines"]


def test_remaining_time_takes_what_was_measured_then_the_earlier_run(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 100.0
    monkeypatch.setattr("paceline.cli.progress.time.monotonic", lambda: now_s)
    first, second = watched.trials[:2]
    assert LiveRanking(watched.trials, {}).state() == Text("0 of 8 trials done")
    live = LiveRanking(watched.trials, {first.configuration: 30.0, second.configuration: 10.0})
    assert live.state() == Text("0 of 8 trials done, about 160 s left".replace("160 s", "3 min"))
    live.started(first)
    now_s += 4.0
    watched.end([first])
    live.look(watched.run, 80)
    # 7 wait: one of 4 s, two of 10 s, and four as long as the mean, 7 s
    assert live.state() == Text("1 of 8 trials done, about 52 s left")
    live.started(second)
    now_s += 6.0
    assert live.state() == Text("1 of 8 trials done, about 46 s left")


def test_the_analysis_takes_a_small_part_of_the_run(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s, made = 0.0, []

    def compare(*_: object, **__: object) -> object:
        nonlocal now_s
        now_s += 1.0
        made.append(now_s)
        return compare_run(watched.run)

    monkeypatch.setattr("paceline.cli.progress._MOST_SHARE", 0.05)
    monkeypatch.setattr("paceline.cli.progress.time.monotonic", lambda: now_s)
    monkeypatch.setattr("paceline.cli.progress.compare_run", compare)
    watched.end(watched.trials)
    live = LiveRanking(watched.trials, {})
    for _ in range(100):
        live.look(watched.run, 80)
        now_s += 1.0
    assert made[0] == 1.0
    assert 4 <= len(made) <= 6


def test_damaged_trial_does_not_end_the_run(watched: Watched) -> None:
    watched.end(watched.trials[:2])
    live = LiveRanking(watched.trials, {})
    before = look(live, watched)
    watched.run.trial(watched.trials[1].id).trial.write_text("{")
    assert look(live, watched) == before


def ended(status: str = "ok") -> Outcome:
    return dataclasses.replace(
        ENDED_WELL, status=status, ended_unix_s=2.5, message="trial t: broken"
    )


def on_terminal(monkeypatch: pytest.MonkeyPatch, width: int) -> io.StringIO:
    """Give the progress a terminal; return what is written to it."""
    out = io.StringIO()
    console = Console(
        file=out, force_terminal=True, force_interactive=True, width=width, height=24, markup=False
    )
    monkeypatch.setattr("paceline.cli.progress.plain_console", lambda **_: console)
    return out


def play(watched: Watched, progress: ConsoleProgress) -> None:
    """Show the whole run; draw after each trial."""
    progress.planned("8 trials", watched.trials, {})
    progress.between_trials(watched.run)
    for number, trial in enumerate(watched.trials, start=1):
        progress.trial_started(trial, watched.run.trial(trial.id), number, 8)
        progress._live.refresh()
        progress.trial_ended(trial, ended())
        watched.end([trial])
        progress.between_trials(watched.run)
        progress._live.refresh()


@pytest.mark.parametrize("width", WIDTHS)
def test_display_says_what_runs_and_leaves_nothing_behind(
    watched: Watched, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    out = on_terminal(monkeypatch, width)
    screen = Screen(width)
    with ConsoleProgress() as progress:
        play(watched, progress)
        screen.feed(out.getvalue().replace("\n", "\r\n"))
        lines = screen.text.splitlines()
        assert lines[0] == "8 trials"
        assert lines[1].startswith("8 of 8 trials done, about 0 s left")
        assert lines[2].startswith("mpi · mpi · processes 2\u00d71, repeat 2 ")
        assert "0/12 steps" in lines[2]
        assert sum(line.count("█") > 0 for line in lines) == 4
        assert max(map(len, lines)) <= width
        assert not screen.cursor_is_shown
        out.truncate(0), out.seek(0)
    screen.feed(out.getvalue().replace("\n", "\r\n"))
    assert screen.text == "8 trials"
    assert screen.cursor_is_shown


def test_failures_stay_above_the_display(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    out = on_terminal(monkeypatch, 80)
    trial = watched.trials[0]
    progress = ConsoleProgress()
    with suppress(KeyboardInterrupt), progress:
        progress.planned("8 trials", watched.trials, {})
        progress.trial_started(trial, watched.run.trial(trial.id), 1, 8)
        progress._live.refresh()
        progress.trial_ended(trial, ended("failed"))
        raise KeyboardInterrupt
    screen = Screen(80)
    screen.feed(out.getvalue().replace("\n", "\r\n"))
    assert screen.text.splitlines() == [
        "8 trials", f"[1/8] {trial.id}  failed  2.5 s", "  trial t: broken"
    ]  # fmt: skip
    assert screen.cursor_is_shown


def test_what_a_run_will_do_wraps_between_words(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = on_terminal(monkeypatch, 80)
    with ConsoleProgress() as progress:
        progress.planned(f"{'8 trials ' * 9}in one line", watched.trials, {})
    screen = Screen(80)
    screen.feed(out.getvalue().replace("\n", "\r\n"))
    assert screen.text.splitlines() == [("8 trials " * 9).strip(), "in one line"]


def test_colours_can_be_switched_off(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    out = on_terminal(monkeypatch, 80)
    with ConsoleProgress() as progress:
        play(watched, progress)
    screen = Screen(80)
    screen.feed(out.getvalue())
    assert not screen.has_colours


def test_without_a_terminal_there_is_one_line_for_each_trial(watched: Watched, capsys) -> None:
    with ConsoleProgress() as progress:
        progress.planned("8 trials", watched.trials, {})
        for number, trial in enumerate(watched.trials, start=1):
            progress.trial_started(trial, watched.run.trial(trial.id), number, 8)
            progress.trial_ended(trial, dataclasses.replace(ended(), message=None))
            progress.between_trials(watched.run)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "8 trials"
    assert lines[1:] == [f"[{n}/8] {t.id}  ok  2.5 s" for n, t in enumerate(watched.trials, 1)]


@pytest.mark.parametrize("error", [KeyboardInterrupt, None])
def test_an_interrupted_run_leaves_its_ranking_on_the_screen(
    error: type[BaseException] | None, capsys: Any
) -> None:
    ended: Any = nullcontext() if error is None else pytest.raises(error)
    with ended, ConsoleProgress() as progress:
        so_far: Any = SimpleNamespace(table="the ranking so far")
        progress._ranking = so_far
        if error is not None:
            raise error
    assert ("the ranking so far" in capsys.readouterr().err) == (error is not None)
