"""The limit of a collective applies to all connections to the store."""

from __future__ import annotations

import pytest
from torch.distributed import HashStore

from paceline.base.host.machine import SAME_CLOCK
from paceline.collectives.store import ANSWER_SHARE
from paceline.train.rank import peers
from paceline.train.rank.peers import Peers, join_peers

OPENED = object()


@pytest.fixture
def calls(monkeypatch):
    """Return what was done with connections to the store, in order; none is opened."""
    done = []

    def open_again(_context, limit_s):
        done.append(("opened", limit_s))
        return OPENED

    monkeypatch.setattr(peers, "open_again", open_again)
    monkeypatch.setattr(peers, "limit_answers", lambda _, limit_s: done.append(("limit", limit_s)))
    return done


@pytest.fixture
def trial(make_trial):
    made = make_trial(ranks=2)
    limits = made.limits.model_copy(update={"rendezvous_s": 40.0, "collective_s": 400.0})
    return made.model_copy(update={"limits": limits})


# Opening a connection limits all connections, so the limit that stays comes afterwards.
EXPECTED = [("opened", 40.0), ("limit", 400.0 * ANSWER_SHARE)]


def test_second_store_keeps_the_limit_of_a_collective(trial, context_of, calls):
    assert Peers(context_of(0, 2), trial, store=object()).second_store() is OPENED
    assert calls == EXPECTED


def test_ranks_that_have_joined_have_the_limit_of_a_collective(
    trial, context_of, calls, monkeypatch
):
    monkeypatch.setattr(peers, "open_store", lambda _context, _limit_s: object())
    monkeypatch.setattr(peers, "store_barrier", lambda *_: None)
    monkeypatch.setattr(peers, "gather", lambda _group, value, _limit_s: [value, value])
    monkeypatch.setattr(peers, "check_node", lambda *_: None)
    monkeypatch.setattr(peers, "measure_offset", lambda *_: SAME_CLOCK)
    monkeypatch.setattr(peers, "create_transport", lambda _trial: None)
    answering = []
    monkeypatch.setattr(peers, "LivenessProbe", lambda _, store, **__: answering.append(store))
    join_peers(context_of(1, 2), trial)
    assert answering == [OPENED]
    assert calls == EXPECTED


def test_a_rank_has_left_before_its_connections_may_be_cut(trial, context_of):
    store, had_left = HashStore(), []

    class CutsConnections:
        def close(self) -> None:
            had_left.append(store.check(["left/1"]))

    store.set("trained/0", "here")
    Peers(context_of(1, 2), trial, store=store, liveness=CutsConnections()).leave(failed=False)
    assert had_left == [True]
