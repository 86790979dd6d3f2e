"""New starts of a trial after a failed rank, with a fake launcher."""

import json
import sys

import pytest

from paceline.measure.records.files import read_json, read_jsonl
from paceline.measure.records.layout import TrialFiles
from paceline.plan.spec.values import CheckpointSettings
from paceline.runner.launchers import supervise
from paceline.runner.launchers.base import Command
from paceline.runner.trials.run_trial import run_trial

# Writes what a rank writes, and fails as often as the first argument says.
PROGRAM = """
import json, os, pathlib, sys, time
failures, root = int(sys.argv[1]), pathlib.Path(sys.argv[2])
rank = root / "ranks" / "0"
rank.mkdir(parents=True, exist_ok=True)
starts = root / "starts"
count = int(starts.read_text()) + 1 if starts.exists() else 1
starts.write_text(str(count))
assert not (rank / "status.json").exists(), "the status of the attempt before is still there"
state = "failed" if count <= failures else "done"
message = "start %d" % count
error = {"kind": sys.argv[3], "message": message, "rank": 0, "host": "other"}
(rank / "status.json").write_text(json.dumps({
    "rank": 0, "host": "other", "pid": 1, "process_started_unix_s": time.time(), "state": state,
    "error": error if state == "failed" else None, "secondary": False,
}))
print("start", count)
sys.exit(5 if state == "failed" else 0)
"""


class FakeLauncher:
    def __init__(self, failures, error):
        self._words = (str(failures), error)

    def command(self, trial, files):
        failures, error = self._words
        return Command(argv=(sys.executable, "-c", PROGRAM, failures, str(files.root), error))

    def failed_rank(self, log_text):
        return None


@pytest.fixture
def run(make_trial, tmp_path, monkeypatch):
    def start(failures, restarts, error="RankFailed", **changes):
        monkeypatch.setattr(
            "paceline.runner.trials.run_trial.launcher_for", lambda _: FakeLauncher(failures, error)
        )
        monkeypatch.setattr("paceline.runner.trials.run_trial.watch", lambda *_: [])
        files = TrialFiles(tmp_path)
        trial = make_trial().model_copy(update={"restarts": restarts, **changes})
        return run_trial(trial, files), files

    return start


def test_interrupted_trial_writes_a_checkpoint_before_its_ranks_are_ended(run, monkeypatch):
    order = []
    end_all = supervise._end_all

    def interrupted(_launched, _limits):
        raise KeyboardInterrupt

    def ended(*arguments):
        order.append("ended")
        return end_all(*arguments)

    monkeypatch.setattr(supervise.Launched, "wait", interrupted)
    monkeypatch.setattr(supervise, "_end_all", ended)
    monkeypatch.setattr(
        "paceline.runner.trials.run_trial.write_last_checkpoint",
        lambda _: order.append("checkpoint"),
    )
    for checkpoint in (CheckpointSettings(every_steps=1), None):
        with pytest.raises(KeyboardInterrupt):
            run(failures=0, restarts=0, checkpoint=checkpoint)
    assert order == ["checkpoint", "ended", "ended"]


def test_trial_ends_well_after_two_failures_of_three_allowed(run):
    outcome, files = run(failures=2, restarts=3)
    assert outcome.status == "ok"
    assert read_json(files.outcome)["status"] == "ok"
    rows = list(read_jsonl(files.failures))
    assert [row["failed_rank"] for row in rows] == [0, 0]
    assert ["start 1" in row["message"] for row in rows] == [True, False]
    assert outcome.launched_unix_s < rows[0]["detected_unix_s"] <= rows[0]["ended_unix_s"]
    logs = [(files.root / f"launcher.{n}.log").read_text() for n in range(2)]
    assert logs == ["start 1\n", "start 2\n"]
    assert files.launcher_log.read_text() == "start 3\n"


def test_failure_beyond_the_allowed_starts_ends_the_trial(run):
    outcome, files = run(failures=9, restarts=1)
    assert outcome.status == "failed"
    assert "start 2" in outcome.reason
    assert len(list(read_jsonl(files.failures))) == 1


def test_without_restarts_there_is_one_start(run):
    outcome, files = run(failures=1, restarts=0)
    assert outcome.status == "failed"
    assert not files.failures.exists()
    assert json.loads((files.root / "starts").read_text()) == 1


@pytest.mark.parametrize(("error", "starts"), [("TimedOut", 2), ("DataError", 1)])
def test_lost_peer_is_worth_a_new_start_but_bad_data_is_not(run, error, starts):
    _, files = run(failures=1, restarts=3, error=error)
    assert json.loads((files.root / "starts").read_text()) == starts


@pytest.mark.parametrize(("failures", "is_said"), [(1, True), (0, False)])
def test_kill_of_the_kernel_is_said_below_the_reason(run, monkeypatch, failures, is_said):
    counts = iter([7, 8])
    monkeypatch.setattr("paceline.runner.trials.run_trial.kills_for_memory", lambda: next(counts))
    outcome, _ = run(failures=failures, restarts=0)
    lines = (outcome.message or "").splitlines()
    assert bool(lines) is is_said
    if is_said:
        assert "start 1" in lines[0]
        assert lines[1].startswith("meanwhile the kernel ended a process of this host for lack of")
