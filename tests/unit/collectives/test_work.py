"""Operations in flight."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest

from paceline.base.errors import RankFailed, TimedOut
from paceline.collectives import work
from paceline.collectives.work import PendingWork, ProgressThread


@pytest.mark.parametrize(
    ("asked", "named"), [(timedelta(0), r"0\.05 s"), (timedelta(seconds=0.02), r"0\.02 s")]
)
def test_message_names_the_limit_that_was_given(asked: timedelta, named: str) -> None:
    """A waiter gives the limiter some more time, which is nobody's limit."""
    with pytest.raises(TimedOut, match=rf"within {named} \(limits"):
        PendingWork("barrier", 0, 0.05, []).wait(asked)


@pytest.fixture
def progress():
    thread = ProgressThread("library", 0, 20.0, "test")
    yield thread
    thread.close(5)


def test_operation_that_is_awaited_runs_in_its_own_thread_if_nothing_is_queued(progress) -> None:
    threads = []
    progress.carry_out("first", lambda: threads.append(threading.current_thread()), []).wait()
    assert threads == [threading.current_thread()]


def test_operation_that_is_awaited_keeps_the_order_behind_a_queued_one(progress) -> None:
    order, released = [], threading.Event()

    def first() -> None:
        released.wait(20)
        order.append("queued")

    queued = progress.submit("first", first, [])
    awaited = progress.carry_out("second", lambda: order.append("awaited"), [])
    assert not awaited.is_completed()
    released.set()
    awaited.wait()
    assert order == ["queued", "awaited"]
    assert queued.is_success()


def test_first_failure_ends_all_later_operations_of_both_kinds(progress) -> None:
    def fail() -> None:
        raise RuntimeError("broken")

    ran = []
    with pytest.raises(RankFailed, match="broken"):
        progress.carry_out("first", fail, []).wait()
    for start in (progress.carry_out, progress.submit):
        with pytest.raises(RankFailed, match="broken"):
            start("later", lambda: ran.append(1), []).wait()
    assert ran == []


class StoppedClock:
    """Shows the time that is set, and counts the looks at it from then on."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.looks = threading.Semaphore(0)

    def monotonic(self) -> float:
        if self.now_s:
            self.looks.release()
        return self.now_s


def test_call_that_limits_itself_has_the_first_word_about_a_time_out(monkeypatch) -> None:
    """It names the absent ranks."""
    clock = StoppedClock()
    monkeypatch.setattr(work, "time", clock)
    monkeypatch.setattr(work, "WATCH_SHARE", 0.4)
    thread = ProgressThread("library", 0, 0.5, "test")

    def wait_in_vain() -> None:
        clock.now_s = 0.6  # after the limit, but before the limiter may fail the call
        for _ in range(2):  # at the second look, what followed from the first one is done
            assert clock.looks.acquire(timeout=20)
        raise TimedOut("rank 2 is absent")

    try:
        with pytest.raises(TimedOut, match="rank 2 is absent"):
            thread.submit("barrier", wait_in_vain, []).get_future().wait()
    finally:
        thread.close(5)


def test_call_that_does_not_return_is_failed(monkeypatch) -> None:
    monkeypatch.setattr(work, "WATCH_SHARE", 0.5)
    thread, ended = ProgressThread("library", 0, 0.2, "test"), threading.Event()
    try:
        with pytest.raises(TimedOut, match=r"library barrier did not end within 0\.2 s"):
            thread.submit("barrier", lambda: ended.wait(20), []).wait()
    finally:
        ended.set()
        thread.close(5)
