"""Results of liveness probes through a real store on loopback; all ranks are in this process."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import ExitStack, suppress

import pytest

from paceline.base.errors import PeerLost, RankFailed, TimedOut
from paceline.collectives import host, liveness
from paceline.collectives.liveness import LivenessProbe, ProbeResult, with_probe_result
from paceline.plan.trials.trial import StoreAddress
from paceline.runner.job.job import listen_on
from paceline.train.rank.peers import open_again, open_store

LIMIT_S = 2.0
HOSTS = ["alpha", "beta", "gamma"]


class Relay:
    """A connection to the store that can be interrupted without closing it, like a broken link."""

    def __init__(self, port):
        self._target = ("127.0.0.1", port)
        self._open = threading.Event()
        self._open.set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self):
        self._open.clear()

    def close(self):
        self._listener.close()

    def _accept(self):
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._target)
                for pair in ((near, far), (far, near)):
                    threading.Thread(target=self._pass_on, args=pair, daemon=True).start()

    def _pass_on(self, source, target):
        with suppress(OSError), source:
            while data := source.recv(65536):
                if self._open.is_set():
                    target.sendall(data)
            target.shutdown(socket.SHUT_WR)


class Clock:
    """Stands for the module `time`: time passes only in sleeps."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


class EndlessTime:
    """Stands for the module `time`: no deadline passes, and sleeps are reported."""

    def __init__(self):
        self.slept = threading.Event()

    def monotonic(self):
        return 0.0

    def sleep(self, seconds):
        self.slept.set()
        time.sleep(seconds)


class Ranks:
    """Ranks that have joined."""

    def __init__(self, context_of, clean_up):
        address = listen_on("lo")
        self.port = address.port
        self._context_of, self._clean_up = context_of, clean_up
        self._server = open_store(context_of(0, 3, store=address), LIMIT_S)

    def join(self, rank, port=None):
        address = StoreAddress(host="127.0.0.1", port=port or self.port, secret="")
        context = self._context_of(rank, 3, store=address)
        store = open_again(context, LIMIT_S) if rank else self._server
        probe = LivenessProbe(
            store,
            open_again(context, LIMIT_S),
            rank=rank,
            hosts=HOSTS,
            limit_s=LIMIT_S,
            interface="lo",
        )
        self._clean_up.callback(probe.close)
        return probe

    def end_server(self):
        self._server = None


@pytest.fixture
def ranks(context_of):
    with ExitStack() as clean_up:
        yield Ranks(context_of, clean_up)
    assert "liveness" not in [thread.name for thread in threading.enumerate()]


def test_rank_that_lives_but_does_not_come_is_told_from_one_that_is_gone(ranks):
    caller, _ = ranks.join(0), ranks.join(1)
    found = caller.call("MPI allreduce")
    assert (found.busy, found.silent, found.waiting) == ([1], [2], [])
    assert found.culprit == 2
    assert found.words() == (
        "rank 2 (gamma) does not answer: gone, frozen, or the link is down; "
        "rank 1 (beta) is alive, but not at this operation"
    )


def test_rank_that_failed_on_its_own_is_named_with_its_words(ranks):
    caller, failing, _ = ranks.join(0), ranks.join(1), ranks.join(2)
    failing.announce("DataError: photo 7 is broken")
    failing.close()
    found = caller.call("MPI allreduce")
    assert found.failed == {1: "DataError: photo 7 is broken"}
    assert found.culprit == 1
    assert "rank 1 (beta) has failed: DataError: photo 7 is broken" in found.words()


def test_rank_that_waits_as_well_is_no_suspect(ranks):
    first, second = ranks.join(0), ranks.join(1)
    ranks.join(2)
    assert first.call("MPI allreduce").busy == [1, 2]
    found = second.call("MPI allreduce")
    assert (found.waiting, found.busy, found.culprit) == ([0], [2], 2)


def test_every_call_asks_anew(ranks):
    caller, other = ranks.join(0), ranks.join(1)
    assert caller.call("").silent == [2]
    other.close()
    assert caller.call("").silent == [1, 2]


def test_probe_does_not_outlast_its_share_of_the_limit(ranks, monkeypatch):
    caller, clock = ranks.join(0), Clock()
    monkeypatch.setattr(liveness, "time", clock)
    assert caller.call("").silent == [1, 2]
    assert 0.2 * LIMIT_S < clock.now <= 0.2 * LIMIT_S + 0.02


def test_broken_link_to_the_store_names_rank_0(ranks):
    relay = Relay(ranks.port)
    try:
        ranks.join(0)
        cut_off = ranks.join(1, relay.port)
        relay.cut()
        found = cut_off.call("a collective of Gloo")
        assert (found.silent, found.culprit) == ([0], 0)
        assert found.words() == (
            "rank 0 (alpha), which serves the store, does not answer: gone, frozen, or the link "
            "is down"
        )
    finally:
        cut_off.close()
        relay.close()


def test_interface_that_is_down_is_named(ranks):
    caller = ranks.join(1)
    caller._interface = "eth77"
    found = caller.call("")
    assert found.words().startswith("interface eth77 of this host (beta) is down; ")


def test_rank_0_stays_until_ranks_that_wait_now_or_later_have_probed(ranks, monkeypatch):
    first, second, third = (ranks.join(rank) for rank in range(3))
    second._leave_word("waiting/1", "MPI allreduce")
    found = first.call("")
    assert (found.waiting, found.busy) == ([1], [2])
    clock = EndlessTime()
    for module in (liveness, host):
        monkeypatch.setattr(module, "time", clock)
    closing = threading.Thread(target=first.close)
    closing.start()
    for probe in (second, third):
        clock.slept.clear()
        assert clock.slept.wait(10), "rank 0 did not wait"
        found = probe.call("MPI allreduce")
        assert (found.server, found.silent) == (None, [])
    closing.join(10)
    assert not closing.is_alive()


@pytest.mark.parametrize(
    ("error", "found", "kind", "rank"),
    [
        (TimedOut("late"), ProbeResult(0, HOSTS, waiting=[2]), TimedOut, None),
        (PeerLost("closed", 0), ProbeResult(0, HOSTS, waiting=[2]), PeerLost, 1),
        (RankFailed("MPI failed", 0), ProbeResult(0, HOSTS, waiting=[2]), PeerLost, 1),
        (RankFailed("MPI failed", 0), ProbeResult(0, HOSTS, busy=[1, 2]), RankFailed, 0),
        (PeerLost("closed", 0), ProbeResult(0, HOSTS), PeerLost, 0),
    ],
)
def test_error_keeps_its_kind_unless_a_peer_is_the_cause(error, found, kind, rank):
    explained = with_probe_result(error, found)
    assert type(explained) is kind
    assert getattr(explained, "rank", None) == rank
    assert str(explained).startswith(f"{error}. Liveness probe: ")
