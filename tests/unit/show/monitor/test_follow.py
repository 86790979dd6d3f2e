"""What the live view says is what the files say, at every moment of a run."""

from __future__ import annotations

import pytest
from tests.unit.analysis import fabricate
from tests.unit.show.monitor import watching

from paceline.base.errors import DataError
from paceline.measure.records.documents import Stopping, only_writer, write_stopping
from paceline.measure.records.layout import RunFiles
from paceline.show.monitor import watch
from paceline.show.monitor.watch import RunFollower


@pytest.fixture
def run(tmp_path):
    return RunFiles(tmp_path / "run")


@pytest.fixture
def trials():
    return [fabricate.make_trial_value(way) for way in (fabricate.SEQUENTIAL, fabricate.MPI)]


def _two_ranks(run, trials, steps=8):
    """Both ranks of the second trial, rank 1 always 0.1 s later with its gradients."""
    files = watching.start(run, trials[1])
    for rank in (0, 1):
        watching.say(files, rank)
        for number in range(steps):
            watching.step(files, rank, number, compute_s=0.3 + 0.1 * rank)
    return files


def test_before_the_first_trial_there_is_a_plan_and_nothing_else(run, trials):
    watching.plan(run, trials)
    view = RunFollower(run).look()
    assert (view.name, view.planned, view.done, view.failed) == ("watched", 2, 0, 0)
    assert view.trial is None
    assert not view.ended


def test_a_running_trial_shows_speed_and_loss_of_all_ranks_together(run, trials):
    watching.plan(run, trials)
    _two_ranks(run, trials)
    trial = RunFollower(run).look().trial
    assert (trial.trial_id, trial.number, trial.steps) == (trials[1].id, 2, 8)
    assert trial.samples_per_s == pytest.approx(8 / 0.5)  # 4 samples of each rank in half a second
    assert trial.loss == pytest.approx(2.0)


def test_new_rows_are_seen_at_the_next_look_and_a_torn_one_when_it_is_whole(run, trials):
    watching.plan(run, trials)
    files = _two_ranks(run, trials, steps=3)
    follower = RunFollower(run)
    assert follower.look().trial.steps == 3
    watching.step(files, 0, 3)
    path = files.rank(1).steps
    whole = path.read_bytes()
    row = whole.splitlines(keepends=True)[-1].replace(b'"step":2', b'"step":3')
    path.write_bytes(whole + row[:40])
    assert follower.look().trial.steps == 3  # not before every rank has ended it
    with path.open("ab") as file:
        file.write(row[40:])
    assert follower.look().trial.steps == 4


def test_speed_waits_until_every_rank_has_begun(run, trials):
    watching.plan(run, trials)
    files = watching.start(run, trials[1])
    watching.say(files, 0)
    watching.step(files, 0, 0)
    trial = RunFollower(run).look().trial
    assert trial.samples_per_s is None
    assert trial.loss is None


def test_hosts_show_shares_of_the_last_tick(run, trials):
    watching.plan(run, trials)
    files = watching.start(run, trials[1])
    trace = files.host("node0").trace
    trace.parent.mkdir(parents=True)
    watching.append(trace, {"interval_s": 2.0})
    follower = RunFollower(run)
    for second, idle in ((10.0, 1.0), (12.0, 2.0), (14.0, 3.0)):
        watching.sample(files, second, cpu_seconds={"user": 3 * idle, "idle": idle})
    cpu = follower.look().trial.cpu["node0"]
    assert (cpu["busy"], cpu["idle"]) == (75.0, 25.0)


def test_the_run_goes_on_to_the_next_trial_and_ends_with_the_last(run, trials):
    watching.plan(run, trials)
    follower = RunFollower(run)
    files = watching.start(run, trials[0])
    assert follower.look().trial.number == 1
    watching.end(files)
    view = follower.look()
    assert (view.done, view.trial, view.ended) == (1, None, False)
    files = _two_ranks(run, trials, steps=2)
    assert follower.look().trial.number == 2
    watching.end(files)
    run.comparison.write_text("{}")
    view = follower.look()
    assert (view.done, view.ended) == (2, True)
    assert view.elapsed_s == 9  # a run that is over gets no older


def test_without_a_closing_document_the_end_is_seen_once_nothing_new_comes(
    run, trials, monkeypatch
):
    watching.plan(run, trials[:1])
    watching.end(watching.start(run, trials[0]))
    follower = RunFollower(run)
    assert not follower.look().ended
    monkeypatch.setattr(watch, "_SETTLED_S", 0.0)
    assert follower.look().ended


def test_a_failed_trial_ends_the_run_and_says_why(run, trials, monkeypatch):
    monkeypatch.setattr(watch, "_SETTLED_S", 0.0)
    watching.plan(run, trials)
    watching.end(watching.start(run, trials[0]), "failed", "rank 1 was killed")
    follower = RunFollower(run)
    follower.look()
    view = follower.look()
    assert (view.done, view.failed, view.ended) == (0, 1, True)
    assert view.message == "rank 1 was killed"


def test_a_run_that_goes_on_after_a_failed_trial_has_not_ended(run, trials, monkeypatch):
    monkeypatch.setattr(watch, "_SETTLED_S", 0.0)
    watching.plan(run, trials)
    watching.end(watching.start(run, trials[0]), "failed", "rank 1 was killed")
    follower = RunFollower(run)
    follower.look()
    with only_writer(run) as is_ours:
        assert is_ours
        assert not follower.look().ended
    assert follower.look().ended


def test_automatic_repeats_end_a_run_before_all_planned_trials(run, trials, monkeypatch):
    monkeypatch.setattr(watch, "_SETTLED_S", 0.0)
    watching.plan(run, trials)
    watching.end(watching.start(run, trials[0]))
    follower = RunFollower(run)
    follower.look()
    write_stopping(run, Stopping(max_repeats=2, tie_margin=0.05))
    assert not follower.look().ended
    write_stopping(run, Stopping(max_repeats=2, tie_margin=0.05, stopped="decided"))
    assert follower.look().ended


def test_a_trial_that_is_repeated_is_read_afresh(run, trials):
    watching.plan(run, trials)
    files = _two_ranks(run, trials, steps=9)
    follower = RunFollower(run)
    assert follower.look().trial.steps == 9
    files.root.rename(run.root / "aside")
    assert follower.look().trial is None
    _two_ranks(run, trials, steps=1)
    assert follower.look().trial.steps == 1


def test_the_search_is_followed_until_the_trials_begin(run, trials):
    watching.plan(run.tune, trials)
    watching.start(run.tune, trials[0])
    follower = RunFollower(run)
    view = follower.look()
    assert (view.stage, view.trial.trial_id) == ("tune", trials[0].id)
    watching.plan(run, trials)
    assert follower.look().stage == ""


def test_a_damaged_row_is_an_error_that_names_the_file(run, trials):
    watching.plan(run, trials)
    files = _two_ranks(run, trials)
    with files.rank(0).steps.open("a") as file:
        file.write("{broken\n")
    with pytest.raises(DataError, match=r"ranks/0/steps\.jsonl"):
        RunFollower(run).look()
