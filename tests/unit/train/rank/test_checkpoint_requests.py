"""After which steps requested checkpoints are due."""

from __future__ import annotations

import itertools
import time

import pytest

from paceline.base.torch_internals import HashStore
from paceline.train.rank import checkpoints
from paceline.train.rank.checkpoints import AnnouncedSteps, Announcements, FirstRankRequests


def test_request_is_due_once_no_other_checkpoint_is_being_written():
    requests = FirstRankRequests(None)
    assert not requests.is_due(1, 1.0, idle=True)
    requests.request()
    assert not requests.is_due(2, 1.0, idle=False), "one is being written"
    assert [requests.is_due(done, 1.0, idle=True) for done in (3, 4)] == [True, False]


def test_request_is_announced_to_the_other_ranks():
    store = HashStore()
    first = FirstRankRequests(Announcements(store))
    first.request()
    assert [d for d in range(1, 10) if first.is_due(d, 0.5, idle=True)] == [4]
    assert Announcements(store).next() == 4


def test_announced_step_is_due_once(monkeypatch):
    monkeypatch.setattr(checkpoints, "_POLL_S", 0.001)
    store = HashStore()
    Announcements(store).announce(7)
    requests = AnnouncedSteps(Announcements(store))
    deadline = time.monotonic() + 10
    while not requests._due and time.monotonic() < deadline:
        time.sleep(0.001)
    assert [requests.is_due(d, 0.1, idle=True) for d in (6, 7, 7)] == [False, True, False]
    requests.close()
    assert not requests._thread.is_alive()


def test_lost_store_ends_the_polling(monkeypatch):
    monkeypatch.setattr(checkpoints, "_POLL_S", 0.001)

    class Lost:
        def check(self, _keys):
            raise RuntimeError("connection lost")

    requests = AnnouncedSteps(Announcements(Lost()))
    requests._thread.join(10)
    assert not requests._thread.is_alive()
    assert not requests.is_due(1, 0.1, idle=True)


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
    monkeypatch.setattr(checkpoints, "_POLL_S", 0.001)
    store = HashStore()
    requests = AnnouncedSteps(Announcements(store, 1, 10.0))
    assert not requests.is_due(5, 0.1, idle=True)
    requests._note(5)
    requests._note(8)
    assert not requests.is_due(6, 0.1, idle=True)
    assert requests.is_due(8, 0.1, idle=True)
    assert not Announcements(store, 1, 10.0).reached(5)
    requests.close()


def test_first_rank_announces_again_if_another_one_was_late():
    store = HashStore()
    announcements = Announcements(store, 1, 10.0)
    answers = {4: False, 8: True}
    for step, in_time in answers.items():
        announcements.answer(step, in_time=in_time)
    first = FirstRankRequests(announcements)
    first.request()
    assert [d for d in range(1, 10) if first.is_due(d, 0.5, idle=True)] == [8]


def test_announced_step_is_ahead_of_the_fastest_rank():
    store = HashStore()
    first = FirstRankRequests(Announcements(store), lambda: 10)
    for done in range(1, 10):
        first.is_due(done, 0.5, idle=True)
    first.request()
    first.is_due(10, 0.5, idle=True)  # the fastest has done 20 steps, two while this one does one
    assert Announcements(store).next() == 20 + 6
