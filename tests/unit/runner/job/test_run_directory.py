"""The records that a trial by hand keeps itself."""

import dataclasses
import json
import os
import shlex
from pathlib import Path

import pytest
from tests.support.rows import failure, write_status

from paceline.base.errors import UsageError
from paceline.base.host.processes import process_started_unix_s
from paceline.measure.records.documents import leave_attempt, read_reported, write_trial
from paceline.measure.records.rows import TERMINATED
from paceline.runner.job import context
from paceline.runner.job.context import launching_pid
from paceline.runner.job.rank_status import RankEnd
from paceline.runner.job.run_directory import finish, prepare, report_own


def outcome(job):
    return json.loads(job.files.outcome.read_text())


def test_first_trial_makes_the_run(make_job):
    job = make_job(seed=9)
    prepare(job)
    manifest = json.loads(job.run.manifest.read_text())
    assert (manifest["schema"], manifest["by_hand"], manifest["name"]) == (2, True, "by-hand")
    assert manifest["data"] == {"tiny": job.trial.training.dataset}
    assert json.loads(job.files.trial.read_text())["training"]["seed"] == 9
    words = Path("/proc/self/cmdline").read_text().rstrip("\0").split("\0")
    assert shlex.split(job.files.command.read_text()) == words


def test_end_is_written_with_the_start_of_what_was_started_by_hand(job):
    prepare(job)
    finish(job, RankEnd(rank=0))
    written = outcome(job)
    assert (written["status"], written["exit_code"], written["failed_rank"]) == ("ok", 0, None)
    started = process_started_unix_s(launching_pid())
    assert written["launched_unix_s"] == pytest.approx(started, abs=0.1)
    assert written["ended_unix_s"] > written["launched_unix_s"]


@pytest.mark.parametrize(
    ("error", "code", "status"),
    [
        ("EnvironmentLacks: x", 3, "refused"),
        ("DataError: x", 4, "refused"),
        ("KeyError: x", 5, "failed"),
        ("TimedOut: x", 6, "timed_out"),
    ],
)
def test_failure_is_written_with_its_rank(error, code, status, job):
    prepare(job)
    finish(job, RankEnd(rank=1, error=failure(error, 1)))
    written = outcome(job)
    assert (written["status"], written["exit_code"]) == (status, code)
    assert (written["failed_rank"], written["message"]) == (1, error)
    assert written["error"]["kind"] == error.partition(":")[0]


BAD_DATA = failure("DataError: x", rank=1, host="b")
LATE = failure("TimedOut: x", rank=1)


def supervised(job):
    write_trial(job.trial, job.files)
    return dataclasses.replace(job, run=None)


@pytest.mark.parametrize("error", [BAD_DATA, LATE])
def test_failure_of_a_rank_that_wrote_none_is_reported_to_the_supervisor(error, job):
    job = supervised(job)
    write_status(job.files, 0, "failed", "PeerLost: x", secondary=True)
    write_status(job.files, 1, "running")
    finish(job, RankEnd(rank=1, error=error))
    assert read_reported(job.files) == error
    assert not job.files.outcome.exists()
    finish(job, RankEnd(rank=0, error=failure("DataError: later")))
    assert read_reported(job.files) == error, "the first one stays"
    leave_attempt(job.files)
    assert read_reported(job.files) is None


def test_what_a_rank_wrote_itself_is_not_reported_again(job):
    job = supervised(job)
    write_status(job.files, 1, "failed", "DataError: x")
    for end in (RankEnd(rank=0), RankEnd(rank=1, error=BAD_DATA)):
        finish(job, end)
    finish(job, RankEnd(rank=0, error=failure("PeerLost: x"), secondary=True))
    assert read_reported(job.files) is None


def test_launcher_may_know_more_than_a_rank_that_was_asked_to_end(job):
    job = supervised(job)
    write_status(job.files, 1, "failed", TERMINATED, secondary=True)
    finish(job, RankEnd(rank=1, error=BAD_DATA))
    assert read_reported(job.files) == BAD_DATA


def test_process_reports_only_what_it_knows_and_where_others_see_it(job):
    report_own(job, RankEnd(rank=1, error=BAD_DATA))
    assert not job.files.root.exists()
    job = supervised(job)
    report_own(job, RankEnd(rank=1, error=LATE))
    assert read_reported(job.files) is None
    report_own(job, RankEnd(rank=1, error=BAD_DATA))
    assert read_reported(job.files) == BAD_DATA


def test_finished_trial_is_not_overwritten(job, make_job):
    prepare(job)
    finish(job, RankEnd(rank=0))
    with pytest.raises(UsageError, match="--repeat 1, "):
        prepare(job)
    second = make_job(repeat=1)
    prepare(second)
    finish(second, RankEnd(rank=0))
    with pytest.raises(UsageError, match="--repeat 2, "):
        prepare(job)


def test_unfinished_attempt_is_set_aside(job):
    prepare(job)
    job.files.rank(0).steps.parent.mkdir(parents=True)
    job.files.rank(0).steps.write_text("old\n")
    prepare(job)
    assert not job.files.rank(0).steps.exists()
    assert job.files.trial.exists()
    kept = job.run.root / "attempts" / f"{job.trial.id}.1" / "ranks" / "0" / "steps.jsonl"
    assert kept.read_text() == "old\n"


@pytest.mark.parametrize(
    ("words", "is_launcher"),
    [
        (["/opt/bin/prterun", "-n", "2"], True),
        (["/jdk/bin/java", "-cp", "x"], True),
        (["python", "-m", "torch.distributed.run"], True),
        (["/usr/bin/python3", "/venv/bin/torchrun", "-m"], True),
        (["bash"], False),
        (["vim", "notes", "about", "mpirun"], False),
    ],
)
def test_parent_is_the_launcher_if_it_is_one(words, is_launcher, monkeypatch):
    monkeypatch.setattr(context, "command_line_of", lambda _pid: words)
    assert launching_pid() == (os.getppid() if is_launcher else os.getpid())
