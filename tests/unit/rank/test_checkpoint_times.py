"""After which steps checkpoints are due."""

from __future__ import annotations

import itertools
import math
import time

import pytest

from paceline.rank import checkpoint_times
from paceline.rank.checkpoint_times import (
    AnnouncedSteps,
    Announcements,
    DalyInterval,
    EverySeconds,
    daly_interval_s,
)
from paceline.torch_internals import HashStore


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(checkpoint_times.time, "monotonic", lambda: now[0])
    return now


def test_single_rank_is_due_as_soon_as_the_seconds_have_passed(clock):
    times = EverySeconds(10.0, None)
    found = []
    for done in range(1, 30):
        clock[0] += 1.5
        if times.is_due(done, 1.5, idle=True):
            found.append(done)
    assert found == [7, 14, 21, 28]


def test_no_checkpoint_is_due_while_one_is_being_written(clock):
    times = EverySeconds(1.0, None)
    clock[0] = 5.0
    assert not times.is_due(1, 1.0, idle=False)
    assert times.is_due(2, 1.0, idle=True)


def test_other_ranks_follow_a_step_that_lies_ahead(clock):
    store = HashStore()
    first = EverySeconds(10.0, Announcements(store))
    heard = Announcements(store)
    due = []
    for done in range(1, 40):
        clock[0] += 0.5
        if first.is_due(done, 0.5, idle=True):
            due.append(done)
    announced = list(iter(heard.next, None))
    assert due == [23]  # 20 steps are 10 s, the announcement is 1.5 s = 3 steps ahead
    assert announced == [23]


def test_request_is_due_once_and_without_any_interval(clock):
    times = EverySeconds(None, None)
    clock[0] = 1e6
    assert not times.is_due(1, 1.0, idle=True)
    times.request()
    assert not times.is_due(2, 1.0, idle=False), "one is being written"
    assert [times.is_due(done, 1.0, idle=True) for done in (3, 4)] == [True, False]


def test_request_is_announced_to_the_other_ranks(clock):
    store = HashStore()
    first = EverySeconds(None, Announcements(store))
    first.request()
    assert [d for d in range(1, 10) if first.is_due(d, 0.5, idle=True)] == [4]
    assert Announcements(store).next() == 4


def test_announced_step_is_due_once(monkeypatch):
    monkeypatch.setattr(checkpoint_times, "_POLL_S", 0.001)
    store = HashStore()
    Announcements(store).announce(7)
    times = AnnouncedSteps(Announcements(store))
    deadline = time.monotonic() + 10
    while not times._due and time.monotonic() < deadline:
        time.sleep(0.001)
    assert [times.is_due(d, 0.1, idle=True) for d in (6, 7, 7)] == [False, True, False]
    times.close()
    assert not times._thread.is_alive()


def test_lost_store_ends_the_polling(monkeypatch):
    monkeypatch.setattr(checkpoint_times, "_POLL_S", 0.001)

    class Lost:
        def check(self, _keys):
            raise RuntimeError("connection lost")

    times = AnnouncedSteps(Announcements(Lost()))
    times._thread.join(10)
    assert not times._thread.is_alive()
    assert not times.is_due(1, 0.1, idle=True)


def test_interval_follows_from_the_delay_of_the_steps():
    interval = DalyInterval(1000.0)
    for _ in range(7):
        interval.add_step(1.0, idle=True)
    assert interval.interval_s is None  # too few steps are known
    interval.add_step(1.0, idle=True)
    assert interval.interval_s == 0.0  # the first checkpoint measures the cost
    interval.begin()
    for step_s, idle in [(1.3, False), (1.2, False), (1.0, True)]:
        interval.add_step(step_s, idle=idle)
    assert interval.cost_s == pytest.approx(0.5)
    # sqrt(2 * 0.5 * 1000) = 31.62, and Daly's two smaller terms
    wanted_s = 31.62 * (1 + 0.0158 / 3 + 0.00025 / 9) - 0.5
    assert interval.interval_s == pytest.approx(wanted_s, rel=1e-3)


def test_next_announcement_is_none_until_it_is_there():
    store = HashStore()
    heard, said = Announcements(store), Announcements(store)
    assert heard.next() is None
    said.announce(5)
    said.announce(9)
    assert list(itertools.islice(iter(heard.next, None), 3)) == [5, 9]


@pytest.mark.parametrize(("late", "stops"), [(0, True), (1, False), (2, False)])
def test_no_rank_stops_unless_all_others_heard_in_time(late, stops):
    store = HashStore()
    others = [Announcements(store, 2, 10.0) for _ in range(2)]
    for number, other in enumerate(others):
        other.answer(7, in_time=number >= late)
        other.answer(9, in_time=True)
    first = Announcements(store, 2, 10.0)
    assert first.reached(7) is stops
    assert first.reached(9)


def test_missing_answers_are_waited_for_until_the_limit():
    assert not Announcements(HashStore(), 1, 0.0).reached(3)


def test_rank_that_has_passed_an_announced_step_says_so(monkeypatch):
    monkeypatch.setattr(checkpoint_times, "_POLL_S", 0.001)
    store = HashStore()
    times = AnnouncedSteps(Announcements(store, 1, 10.0))
    assert not times.is_due(5, 0.1, idle=True)
    times._note(5)
    times._note(8)
    assert not times.is_due(6, 0.1, idle=True)
    assert times.is_due(8, 0.1, idle=True)
    assert not Announcements(store, 1, 10.0).reached(5)
    times.close()


def test_first_rank_announces_again_if_another_one_was_late(clock):
    store = HashStore()
    announcements = Announcements(store, 1, 10.0)
    answers = {4: False, 8: True}
    for step, in_time in answers.items():
        announcements.answer(step, in_time=in_time)
    first = EverySeconds(None, announcements)
    first.request()
    assert [d for d in range(1, 10) if first.is_due(d, 0.5, idle=True)] == [8]


def test_announced_step_is_ahead_of_the_fastest_rank(clock):
    store = HashStore()
    first = EverySeconds(None, Announcements(store), lambda: 10)
    for done in range(1, 10):
        first.is_due(done, 0.5, idle=True)
    first.request()
    first.is_due(10, 0.5, idle=True)  # the fastest has done 20 steps, two while this one does one
    assert Announcements(store).next() == 20 + 6


def test_daly_is_youngs_for_rare_failures():
    assert daly_interval_s(0.01, 1e6) == pytest.approx(math.sqrt(2 * 0.01 * 1e6), rel=1e-3)


def test_daly_is_the_mean_time_between_failures_where_checkpoints_cost_more():
    assert daly_interval_s(30.0, 10.0) == 10.0


@pytest.mark.parametrize("cost_s", [0.1, 5.0, 60.0])
def test_no_other_interval_is_better_than_dalys(cost_s):
    def time_s(interval_s):  # expected, with failures (Daly's equation 20)
        mtbf_s, restart_s, segments = 1000.0, 20.0, 1e5 / interval_s
        growth = math.expm1((interval_s + cost_s) / mtbf_s)
        return mtbf_s * math.exp(restart_s / mtbf_s) * growth * segments

    best = daly_interval_s(cost_s, 1000.0)
    others = [best * factor for factor in (0.25, 0.5, 0.8, 1.25, 2.0, 4.0)]
    assert time_s(best) < min(map(time_s, others))
