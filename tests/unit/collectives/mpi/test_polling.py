from __future__ import annotations

import pytest

from paceline.base.errors import TimedOut
from paceline.collectives.mpi import world
from paceline.collectives.mpi.world import AdaptivePause


class Clock:
    """Time passes only in sleeps, and by a microsecond with each look at it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.sleeps: list[float] = []

    def perf_counter(self) -> float:
        self.now += 1e-6
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.sleeps.append(seconds)


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(world, "time", clock)
    return clock


def test_request_that_was_given_up_keeps_the_memory_that_mpi_may_write_to(clock, monkeypatch):
    class Pending:
        def Test(self):  # noqa: N802  (mpi4py's name)
            return False

    monkeypatch.setattr(world, "_abandoned", [])
    request = Pending()
    with pytest.raises(TimedOut, match="MPI broadcast"):
        world.complete(request, "broadcast", 0, 0.01)
    assert world._abandoned == [request]


def test_message_that_comes_at_once_is_not_slept_over(clock):
    pause = AdaptivePause()
    for _ in range(10):
        pause.sleep(ended=0, left=1)
    assert clock.sleeps == []


def test_sleeps_grow_to_half_a_millisecond_while_nothing_comes(clock):
    pause = AdaptivePause()
    while clock.now < 0.1:
        pause.sleep(ended=0, left=4)
    assert clock.sleeps == sorted(clock.sleeps)
    assert clock.sleeps[0] < 50e-6
    assert clock.sleeps[-1] == pytest.approx(500e-6)


def test_sleeps_shrink_where_much_comes_between_looks(clock):
    pause = AdaptivePause()
    while clock.now < 0.1:
        pause.sleep(ended=0, left=4)
    before = len(clock.sleeps)
    for _ in range(10):
        pause.sleep(ended=8, left=8)
    assert clock.sleeps[-1] < 50e-6
    assert len(clock.sleeps) == before + 10


def test_next_step_of_a_chain_is_met_without_a_sleep(clock):
    pause = AdaptivePause()
    while clock.now < 0.01:
        pause.sleep(ended=0, left=2)
    slept = len(clock.sleeps)
    pause.sleep(ended=2, left=0)
    pause.sleep(ended=0, left=2)
    assert len(clock.sleeps) == slept


def test_last_message_is_noticed_within_a_share_of_the_time_that_messages_took(clock):
    pause = AdaptivePause()
    while clock.now < 0.1:  # the peer is late: nothing flows yet
        pause.sleep(ended=0, left=4)
    began = clock.now
    pause.sleep(ended=1, left=3)
    while clock.now < began + 0.002:
        before = clock.now
        pause.sleep(ended=0, left=3)
        looks_s = 5e-6
        assert clock.now - before <= max(20e-6, (before - began) / 30) + looks_s
