"""A rank's life as others see it: status, log, exit code, whatever the training does."""

import dataclasses
import errno
import gc
import json
import os
import signal
import sys
import time
from contextlib import contextmanager

import pytest

from paceline.base.errors import DataError, ExitCode, PeerLost, RankFailed, TimedOut
from paceline.collectives.host import Process
from paceline.collectives.signatures import SECRET_VARIABLE
from paceline.measure.records.documents import read_statuses
from paceline.plan.trials.trial import StoreAddress
from paceline.runner.job import rank as module
from paceline.runner.job.rank import import_train, run_rank
from paceline.runner.job.rank_status import RankEnd, RankStatusFile, is_secondary, terminated
from paceline.runner.job.run_directory import prepare


@pytest.fixture
def run(make_job, job_context, monkeypatch):
    """Run rank 1 with `training` in place of the worker."""
    monkeypatch.setattr(module, "die_with_parent", lambda _parent: None)  # the parent is pytest's
    monkeypatch.setattr(module, "_CAUSE_FIRST_S", 0.0)

    def go(training, *, supervised=False):
        job = make_job()
        prepare(job)
        if supervised:
            job = dataclasses.replace(job, run=None)
            # pytest's own sys.stderr is not on descriptor 2
            plain = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
            monkeypatch.setattr(sys, "stderr", plain)
        monkeypatch.setattr(module, "_train", training)
        end = run_rank(job, job_context(1))
        return end, json.loads(job.files.rank(1).status.read_text()), job

    return go


def failing(error):
    def training(_job, _context):
        raise error

    return training


def test_rank_that_trains_to_the_end_is_done(run):
    seen = {}

    def training(job, context):
        seen.update(json.loads(job.files.rank(context.rank).status.read_text()))

    end, status, _ = run(training)
    assert seen["state"] == "running"
    assert seen["pid"] == os.getpid()
    assert end == RankEnd(rank=1)
    assert (status["state"], status["error"], status["secondary"]) == ("done", None, False)


def test_rank_signs_with_the_secret_that_came_with_the_address(make_job, job_context, monkeypatch):
    monkeypatch.setenv(SECRET_VARIABLE, "of an earlier trial in this process")
    monkeypatch.setattr(module, "die_with_parent", lambda _parent: None)
    seen = []
    monkeypatch.setattr(module, "_train", lambda *_: seen.append(os.environ[SECRET_VARIABLE]))
    job = make_job()
    prepare(job)
    store = StoreAddress(host="127.0.0.1", port=1, secret="of this trial")
    for address in (store, None):
        run_rank(job, dataclasses.replace(job_context(1), store=address))
    assert seen == ["of this trial", ""]


def test_error_of_ours_is_told_without_a_trace(run, capfd):
    end, status, _ = run(failing(DataError("photo 3 is damaged")))
    assert (end.exit_code, end.secondary) == (4, False)
    assert status["state"] == "failed"
    error = status["error"]
    assert (error.pop("unix_s") <= time.time(), error) == (
        True,
        {"kind": "DataError", "message": "photo 3 is damaged", "rank": 1, "host": "here"},
    )
    told = capfd.readouterr().err
    assert told == "paceline: rank 1 of 2 failed: DataError: photo 3 is damaged\n"


def test_full_disk_is_told_without_a_trace(run, capfd):
    error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/run/tensors/weights.safetensors")
    end, _, _ = run(failing(error))
    assert end.exit_code == 3
    told = capfd.readouterr().err
    assert "/run/tensors/weights.safetensors: No space left on device; free some space" in told
    assert "Traceback" not in told


def test_unexpected_error_leaves_its_trace_in_the_log(run, capfd):
    end, status, job = run(failing(ZeroDivisionError("by zero")), supervised=True)
    assert end.exit_code == 5
    assert (status["error"]["kind"], status["error"]["message"]) == ("ZeroDivisionError", "by zero")
    log = job.files.rank(1).log.read_text()
    assert "Traceback" in log
    assert "raise error" in log
    told = capfd.readouterr().err
    assert told == "paceline: rank 1 of 2 failed: ZeroDivisionError: by zero\n"


def test_what_c_code_prints_goes_to_the_ranks_log_too(run, capfd):
    def training(_job, _context):
        os.write(1, b"from below\n")
        os.write(2, b"and beside\n")

    _, _, job = run(training, supervised=True)
    log = job.files.rank(1).log.read_text()
    assert "from below\nand beside\n" in log
    assert "rank 1 of 2 (host here" in log
    assert "from below" not in "".join(capfd.readouterr())


@pytest.mark.parametrize("parent_is_launcher", [True, False])
def test_rank_ends_with_its_launcher_but_not_with_a_shell(
    parent_is_launcher, job, job_context, monkeypatch
):
    bound_to = []
    monkeypatch.setattr(module, "die_with_parent", bound_to.append)
    monkeypatch.setattr(module, "_train", lambda _job, _context: None)
    run_rank(job, job_context(1), parent_is_launcher=parent_is_launcher)
    assert bound_to == ([os.getppid()] if parent_is_launcher else [])


def test_missing_a_peer_is_secondary(run, capfd):
    end, status, _ = run(failing(PeerLost("rank 0 has gone", 0)))
    assert (end.exit_code, end.secondary) == (5, True)
    assert status["secondary"] is True
    assert "another rank is the cause" in capfd.readouterr().err


def test_rank_without_the_run_directory_says_that_it_must_be_shared(job, job_context, monkeypatch):
    monkeypatch.setattr(module, "die_with_parent", lambda _parent: None)
    end = run_rank(job, job_context(1))
    assert end.exit_code == 3
    assert "storage that all nodes share" in str(end.error)


def test_time_limit_by_hand_ends_the_process(make_job, job_context, monkeypatch):
    class Ended(BaseException):
        pass

    codes = []
    monkeypatch.setattr(module, "die_with_parent", lambda _parent: None)
    monkeypatch.setattr(module.os, "_exit", codes.append)
    job = make_job(trial_s=0.05)
    prepare(job)

    def training(_job, _context):
        deadline = module.time.monotonic() + 10
        while not codes and module.time.monotonic() < deadline:
            module.time.sleep(0.01)
        raise Ended

    monkeypatch.setattr(module, "_train", training)
    with pytest.raises(Ended):
        run_rank(job, job_context(0))
    assert codes == [6]
    status = json.loads(job.files.rank(0).status.read_text())
    assert status["error"]["kind"] == "TimedOut"
    assert status["error"]["message"].startswith("not done within its limit of 0.05 s")


class ExitedError(BaseException):
    """Stands for the end of the process; its argument is the exit status."""


@pytest.fixture
def full_disk(monkeypatch):
    """Let no status be written; raise ExitedError in place of os._exit."""

    def write(*_args, **_named):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def leave(code):
        raise ExitedError(code)

    monkeypatch.setattr(RankStatusFile, "write", write)
    monkeypatch.setattr(os, "_exit", leave)


@pytest.mark.usefixtures("full_disk")
def test_time_limit_ends_the_process_on_a_full_disk_too(job, job_context, monkeypatch):
    @contextmanager
    def limit_that_has_passed(_job, expire):
        expire()
        yield

    monkeypatch.setattr(module, "die_with_parent", lambda _parent: None)
    monkeypatch.setattr(module, "trial_limit", limit_that_has_passed)
    with pytest.raises(ExitedError, match=f"^{int(ExitCode.TIMED_OUT)}$"):
        run_rank(job, job_context(1))


@pytest.mark.usefixtures("full_disk")
def test_rank_that_is_asked_to_end_does_so_on_a_full_disk_too(job, job_context):
    status = RankStatusFile(job, job_context(1))
    with pytest.raises(ExitedError, match=f"^{int(ExitCode.TERMINATED)}$"), terminated(status):
        signal.raise_signal(signal.SIGTERM)


def caused_by(error, cause):
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "secondary"),
    [
        (RuntimeError("[gloo] Connection closed by peer [127.0.0.1]:1234"), True),
        (ConnectionResetError("x"), True),
        (caused_by(RankFailed("x"), ConnectionResetError("y")), True),
        (TimedOut("waited 3 s"), False),
        (RuntimeError("shapes do not match"), False),
        (ValueError("connection reset by peer"), False),
    ],
)
def test_secondary_errors_are_told_apart(error, secondary):
    assert is_secondary(error) is secondary


def test_worker_is_imported_without_the_garbage_collector(make_trial, monkeypatch):
    seen = []
    monkeypatch.setattr(module, "import_module", lambda name: seen.append((name, gc.isenabled())))
    import_train(make_trial())
    assert seen == [("paceline.train.rank.train", False)]


def test_status_identifies_the_process_or_the_one_that_stands_for_it(job, job_context):
    parent = os.getppid()
    status = RankStatusFile(job, job_context(1))
    status.write("running")
    (written,) = read_statuses(job.files)
    assert written.process == Process.current()
    assert written.is_alive()
    status.write("running", pid=parent, started_unix_s=1.0)
    (written,) = read_statuses(job.files)
    assert written.process == Process.of(parent)
