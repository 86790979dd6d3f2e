"""Ranks as children of one process: one failure ends all, and the first to fail is named."""

from __future__ import annotations

import dataclasses
import signal
import subprocess
import sys

import pytest
from tests.support.rows import running_rank

from paceline.measure.records.files import write_json
from paceline.runner.launchers import local as node

SLEEP = "import time; time.sleep(60)"


@pytest.fixture
def run(make_job, monkeypatch):
    """Run programs as the ranks of a job; statuses are written before they start."""
    children = []

    def start(programs, *statuses, limit_s=60.0, notice_s=30.0):
        monkeypatch.setattr(node, "_NOTICE_S", notice_s)
        job = make_job(launcher="local", ranks=len(programs))
        limits = job.trial.limits.model_copy(update={"trial_s": limit_s})
        job = dataclasses.replace(job, trial=job.trial.model_copy(update={"limits": limits}))
        for status in statuses:
            write_json(job.files.rank(status.rank).status, status)

        def start_rank(_job, rank, _address):
            children.append(subprocess.Popen([sys.executable, "-c", programs[rank]]))
            return children[-1]

        monkeypatch.setattr(node, "_start", start_rank)
        before = signal.getsignal(signal.SIGTERM)
        end = node.run_ranks(job)
        assert signal.getsignal(signal.SIGTERM) == before
        assert all(child.poll() is not None for child in children)
        return end

    return start


def failed(rank, error, *, secondary=False):
    return running_rank(rank, host="elsewhere", state="failed", error=error, secondary=secondary)


def test_ranks_that_end_well_are_a_good_end(run):
    end = run(["pass", "pass"])
    assert (end.exit_code, end.error) == (0, None)


def test_rank_that_dies_without_a_reason_is_named_and_ends_its_peer(run, capsys):
    end = run([SLEEP, "raise SystemExit(9)"], notice_s=0.2)
    assert (end.rank, end.exit_code) == (1, 5)
    assert str(end.error) == "RankFailed: ended with status 9 and wrote no error"
    assert "rank 1 of 2 failed: RankFailed: ended with status 9" in capsys.readouterr().err


def test_error_of_a_rank_outweighs_a_peer_that_was_lost(run, capsys):
    end = run(
        ["raise SystemExit(5)", "raise SystemExit(4)"],
        failed(0, "PeerLost: x", secondary=True),
        failed(1, "DataError: image 3 is damaged"),
    )
    assert (end.rank, end.exit_code, str(end.error)) == (1, 4, "DataError: image 3 is damaged")
    assert capsys.readouterr().err == ""  # the rank itself has printed it


def test_rank_without_a_status_outweighs_a_peer_that_was_lost(run):
    end = run(["raise SystemExit(5)"] * 2, failed(0, "PeerLost: x", secondary=True))
    assert (end.rank, str(end.error)) == (1, "RankFailed: ended with status 5 and wrote no error")


def test_ranks_that_all_lost_a_peer_keep_their_error(run):
    statuses = [failed(rank, f"PeerLost: {rank}", secondary=True) for rank in (0, 1)]
    end = run(["raise SystemExit(5)"] * 2, *statuses)
    assert (end.rank, str(end.error)) == (0, "PeerLost: 0")


def test_ranks_that_take_too_long_are_ended(run):
    end = run([SLEEP, SLEEP], limit_s=0.3)
    assert end.exit_code == 6
    assert str(end.error).startswith("TimedOut: not done within its limit of 0.3 s")


def test_signal_that_ended_a_rank_is_named(run):
    end = run([SLEEP, "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"], notice_s=0.2)
    assert end.rank == 1
    assert str(end.error).startswith("RankFailed: crashed with SIGSEGV (signal 11): compiled code")
