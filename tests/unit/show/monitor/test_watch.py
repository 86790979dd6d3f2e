"""Watching begins, ends and gives up when it should, and never writes."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from tests.unit.analysis import fabricate
from tests.unit.show.monitor import watching

from paceline.base.errors import DataError, TimedOut
from paceline.measure.records.layout import RunFiles
from paceline.show.monitor import watch
from paceline.show.monitor import watch as follow
from paceline.show.monitor.watch import RunView, TrialView


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setattr(follow, "_SETTLED_S", 0.0)
    return RunFiles(tmp_path / "run")


@pytest.fixture
def trial():
    return fabricate.make_trial_value(fabricate.SEQUENTIAL)


def _watched(run: RunFiles, *, once: bool = False, terminal: bool = False) -> str:
    text = io.StringIO()
    console = Console(file=text, force_terminal=terminal, width=80, height=24)
    watch.watch(run, console, once=once, interval_s=0.0)
    return text.getvalue()


def _everything(run: RunFiles) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in run.root.rglob("*")}


def test_a_finished_run_ends_at_once_and_names_the_report(run, trial) -> None:
    watching.plan(run, [trial])
    watching.end(watching.start(run, trial))
    run.report.write_text("<html>")
    run.comparison.write_text("{}")
    before = _everything(run)
    assert _watched(run) == f"the run has ended: 1 trial done; report: {run.report}\n"
    assert _everything(run) == before


def test_without_a_terminal_there_is_a_plain_line_a_tick(run, trial, monkeypatch) -> None:
    watching.plan(run, [trial])
    files = watching.start(run, trial)
    ticks = []

    def tick(seconds: float) -> None:
        ticks.append(seconds)
        watching.step(files, 0, len(ticks) - 1)
        if len(ticks) == 3:
            watching.end(files)

    monkeypatch.setattr(watch.time, "sleep", tick)
    lines = _watched(run).splitlines()
    # the end is believed at the look after the one that finds it
    assert [line.split("step ")[1].split("/")[0] for line in lines[:3]] == ["0", "1", "2"]
    assert lines[-1].startswith("the run has ended: 1 trial done")
    assert "\x1b" not in "".join(lines)


def test_a_terminal_gets_a_screen(run, trial) -> None:
    watching.plan(run, [trial])
    watching.end(watching.start(run, trial), "failed", "out of memory")
    text = _watched(run, terminal=True)
    assert "failed: out of memory" in text
    assert "0 trials done, 1 failed" in text


def test_once_shows_the_view_and_ends_although_the_run_goes_on(run, trial) -> None:
    watching.plan(run, [trial])
    watching.step(watching.start(run, trial), 0, 0)
    text = _watched(run, once=True)
    assert text.startswith("watched")
    assert trial.id in text


def test_a_directory_that_is_no_run_is_refused(run, monkeypatch) -> None:
    with pytest.raises(DataError, match="expected a run directory"):
        _watched(run, once=True)
    monkeypatch.setattr(watch, "_BEGIN_LIMIT_S", 0.0)
    with pytest.raises(DataError, match="expected a run directory"):
        _watched(run)


def test_a_run_that_says_nothing_any_more_is_given_up(run, trial, monkeypatch) -> None:
    watching.plan(run, [trial])
    limits = trial.limits.model_copy(update={"trial_s": 1e-9})
    watching.start(run, trial.model_copy(update={"limits": limits}))
    monkeypatch.setattr(watch, "_IDLE_LIMIT_S", 0.0)
    with pytest.raises(TimedOut, match="--resume"):
        _watched(run)


def _view(trial: TrialView | None = None, **values) -> RunView:
    usual = {
        "name": "mine", "stage": "", "planned": 9, "done": 3, "failed": 0, "elapsed_s": 3725.0,
        "trial": trial, "ended": False, "message": None,
    }  # fmt: skip
    return RunView(**{**usual, **values})


def test_lines_say_how_far_the_run_is_and_what_failed() -> None:
    trial = TrialView(
        trial_id="tiny.r0", number=4, steps=12, steps_planned=24, samples_per_s=1234.5, loss=1.0625,
        cpu={"node0": {"busy": 70.0, "idle": 25.0, "iowait": 5.0}},
    )  # fmt: skip
    assert list(watch.view_lines(_view(trial, failed=1, message="out of memory"))) == [
        "mine: 3 of 9 done, 1 failed, 1:02:05",
        "trial 4: tiny.r0",
        "step 12/24, 1234 samples/s, loss 1.062",
        "node0: CPU 70%, idle 25%, IOWait 5%",
        "failed: out of memory",
    ]


def test_what_is_not_known_is_left_out() -> None:
    early = TrialView(
        trial_id="tiny.r0", number=None, steps=0, steps_planned=None, samples_per_s=None, loss=None,
        cpu={},
    )  # fmt: skip
    lines = list(watch.view_lines(_view(early, planned=None, stage="tune", elapsed_s=None)))
    assert lines == ["mine (tune): 3 done", "tiny.r0", "step 0"]


def test_between_trials_it_says_what_is_awaited() -> None:
    assert list(watch.view_lines(_view()))[1] == "waiting for the next trial"
    assert list(watch.view_lines(_view(done=0)))[1] == "waiting for the first trial"
