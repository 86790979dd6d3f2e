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


@pytest.mark.parametrize("asks_first", [True, False])
def test_a_future_has_the_result_whenever_it_is_asked_for(progress, asks_first) -> None:
    released, results = threading.Event(), [object()]
    pending = progress.submit("first", lambda: released.wait(20), results)
    future = pending.get_future() if asks_first else None
    released.set()
    pending.wait()
    assert (future or pending.get_future()).wait() == results
    assert pending.get_future() is pending.get_future()


def test_an_ended_operation_answers_as_a_pending_one_that_has_ended(progress) -> None:
    results = [object()]
    ended = progress.carry_out("first", lambda: None, results)
    assert ended.wait(timeout=timedelta(seconds=1))
    ended.synchronize()
    assert (ended.is_completed(), ended.is_success(), ended.exception()) == (True, True, None)
    assert ended.result() == ended.get_future().wait() == results
    failed = progress.carry_out("second", lambda: 1 / 0, results)
    assert (failed.is_completed(), failed.is_success()) == (True, False)
    assert isinstance(failed.exception(), RankFailed)
    with pytest.raises(RankFailed, match="second failed"):
        failed.result()
    with pytest.raises(RankFailed, match="second failed"):
        failed.get_future().wait()


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


def test_callback_may_wait_for_operations_queued_before_and_in_it():
    progress = ProgressThread("library", 0, 20.0, "group")
    go_on = threading.Event()
    first = progress.submit("first", lambda: go_on.wait(10), [1])
    second = progress.submit("second", lambda: None, [2])

    def depend(future):
        later = [progress.submit(f"later {n}", lambda: None, [n]).get_future() for n in (3, 4)]
        return future.value() + [x for each in (second.get_future(), *later) for x in each.wait()]

    result = first.get_future().then(depend)
    go_on.set()
    ended = threading.Event()
    result.add_done_callback(lambda _: ended.set())
    assert ended.wait(10)
    assert result.value() == [1, 2, 3, 4]
    progress.close(5.0)
    assert not [each for each in threading.enumerate() if each.name.startswith("library")]


def test_interrupt_in_the_callers_thread_fails_all_later_operations():
    progress = ProgressThread("library", 0, 20.0, "group")

    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        progress.carry_out("first", interrupted, [])
    for start in (progress.carry_out, progress.submit):
        with pytest.raises(RankFailed, match=r"rank 0: library first failed: KeyboardInterrupt"):
            start("second", lambda: None, []).wait()
    progress.close(1.0)


def test_operations_behind_one_that_does_not_return_fail_with_it():
    progress = ProgressThread("library", 0, 0.5, "group")
    release = threading.Event()
    stuck = progress.submit("stuck", lambda: release.wait(20), [])
    behind = progress.submit("behind", lambda: None, [])
    for each in (stuck, behind, progress.submit("after", lambda: None, [])):
        with pytest.raises(Exception, match=r"library stuck did not end within 0\.5 s"):
            each.get_future().wait()
    release.set()
    progress.close(1.0)
