"""A rank that mpirun started, without MPI."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest

from paceline.base.errors import ExitCode, TimedOut, UsageError
from paceline.base.host.machine import host_name
from paceline.measure.records.documents import exit_code_of, read_reported, write_trial
from paceline.runner.job.rank_status import RankEnd
from paceline.runner.launchers.mpi import rank as module


@pytest.fixture
def job(make_job, monkeypatch):
    made = make_job(ranks=2)
    write_trial(made.trial, made.files)
    supervised = dataclasses.replace(made, run=None)
    monkeypatch.setattr(module, "_job", lambda _world, _launcher: supervised)
    return supervised


def world(size: int) -> SimpleNamespace:
    """Return what MPI tells rank 1 of so many on this host."""
    return SimpleNamespace(
        rank=1, size=size, gather=lambda value: [value] * size, of_this_node=lambda value: value
    )


def test_refusal_of_a_rank_that_has_no_status_yet_is_a_record(job):
    with pytest.raises(UsageError, match="expected 2 ranks"):
        module.train(world(3))
    reported = read_reported(job.files)
    assert reported is not None
    assert (reported.rank, reported.host) == (1, host_name())
    assert exit_code_of(reported) == ExitCode.USAGE


def test_rank_that_waits_too_long_for_others_at_the_end_reports_nothing(job, monkeypatch):
    def waits(*_args, **_named) -> RankEnd:
        raise TimedOut("ranks did not end")

    monkeypatch.setattr(module, "_train_job", waits)
    with pytest.raises(TimedOut):
        module.train(world(2))
    assert read_reported(job.files) is None
