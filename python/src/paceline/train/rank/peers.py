"""Connect the ranks of a trial, keep what they share, and disconnect without hanging."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta

import torch

from paceline.base.errors import EnvironmentLacks, PacelineError, PeerLost, RankFailed, TimedOut
from paceline.base.host.machine import SAME_CLOCK, ClockOffset, best_offset
from paceline.base.version import __version__
from paceline.collectives.liveness import LivenessProbe, with_probe_result
from paceline.collectives.node.memory import NodeShare, SoloNode, gather, of_first
from paceline.collectives.store import (
    ANSWER_SHARE,
    GroupStore,
    connect_store,
    limit_answers,
    limited,
    put,
    server_lost,
    store_barrier,
    take,
    wait_for,
)
from paceline.collectives.torch_internals import PrefixStore, Store, TCPStore
from paceline.measure.records.communication import TransportResult
from paceline.plan.trials.trial import RankContext, StoreAddress, Trial
from paceline.train.training.resources import RankCores, check_node
from paceline.train.transports import Transport, create_transport

_ROUNDS = 8  # of questions about the clock


class Peers:
    """All ranks of a trial; created by `join_peers`. A single rank has no store and no
    transport."""

    def __init__(
        self,
        context: RankContext,
        trial: Trial,
        store: TCPStore | None = None,
        transport: Transport | None = None,
        clock: ClockOffset = SAME_CLOCK,
        liveness: LivenessProbe | None = None,
    ) -> None:
        self.clock = clock
        # Called while this rank has ended and others train; what it raises ends the wait.
        self.while_leaving: Callable[[], None] | None = None
        self._liveness = liveness
        self._context = context
        self._trial = trial
        self._opened = 0  # times that the transport was opened
        self._limits = trial.limits
        self._store = store
        self._transport = transport

    def node(self, purpose: str) -> NodeShare:
        """Return the ranks of this node for one purpose."""
        context = self._context
        prefix = f"node {context.node_index} ({context.host})/{purpose}"
        return self._share(context.local_rank, context.ranks_on_node, prefix)

    def world(self, purpose: str) -> NodeShare:
        """Return all ranks for one purpose, as if on one node."""
        return self._share(self._context.rank, self._context.world_size, f"world/{purpose}")

    def _share(self, rank: int, ranks: int, prefix: str) -> NodeShare:
        store = self._store
        return SoloNode() if store is None else GroupStore(store, rank, ranks, prefix)

    def second_store(self) -> TCPStore | None:
        """Open another connection to the store, for a thread; None for a single rank.

        Raises TimedOut if the store does not answer.
        """
        if self._store is None:
            return None
        store = open_again(self._context, self._limits.rendezvous_s)
        _limit_answers(self._store, self._trial)
        return store

    @property
    def is_first(self) -> bool:
        return self._context.is_first

    def of_first_rank(self, name: str, value: str) -> str:
        """Return the first rank's value on all ranks; collective, once for each name."""
        return of_first(self.world(name), value, self._limits.collective_s)

    def of_all_ranks(self, name: str, value: str) -> list[str]:
        """Return the values of all ranks; collective, once for each name."""
        return gather(self.world(name), value, self._limits.collective_s)

    @property
    def has_transport(self) -> bool:
        """Return whether the ranks have a process group of torch, open or not."""
        return self._transport is not None

    def open_transport(self) -> None:
        """Open the transport's process group; collective. A script may do so again after it has
        destroyed the group.

        Raises what `Transport.open` raises.
        """
        assert self._store is not None
        assert self._transport is not None
        # Keys of an earlier group would let this one connect to ranks that have left.
        store = PrefixStore(f"transport/{self._opened}", self._store)
        self._opened += 1
        with limited(f"rank {self._context.rank}: rank 0's store", self._limits.rendezvous_s):
            self._transport.open(self._context, self._trial, store)

    def describe(self) -> TransportResult:
        return {} if self._transport is None else self._transport.describe()

    def explain(self, error: Exception) -> PacelineError | None:
        """Return the meaning of an error from a collective, with the ranks that caused it.

        Return None if it is not about communication; then the other ranks are notified that this
        rank fails.
        """
        meaning = self._meaning(error)
        if self._liveness is None:
            return meaning
        if not isinstance(meaning, TimedOut | RankFailed):
            self._liveness.announce(f"{type(error).__name__}: {error}")
            return meaning
        return with_probe_result(meaning, self._liveness.call(str(meaning)))

    def _meaning(self, error: Exception) -> PacelineError | None:
        if isinstance(error, TimedOut | PeerLost):
            return error
        lost = server_lost(error, f"rank {self._context.rank}: rank 0's store")
        if lost is not None or self._transport is None:
            return lost
        if isinstance(error, PacelineError) and not isinstance(error, RankFailed):
            return None  # not an error of the transport
        return self._transport.explain(error)

    @contextmanager
    def leaving(
        self, explain: Callable[[Exception], PacelineError | None] = lambda _error: None
    ) -> Iterator[None]:
        """Leave when the block ends, whether it ends well or not.

        An error of a collective is raised as its meaning (`Peers.explain`), another one as what
        `explain` returns, or unchanged if that is None.
        """
        try:
            yield
        except Exception as error:
            meaning = self.explain(error) or explain(error)
            self.leave(failed=True)
            if meaning is None or meaning is error:
                raise
            raise meaning from error
        except BaseException:
            self.leave(failed=True)
            raise
        self.leave(failed=False)

    def leave(self, *, failed: bool) -> None:
        """Close everything. Without a failure rank 0, which serves the store, leaves last."""
        store, self._store = self._store, None
        transport, self._transport = self._transport, None
        liveness, self._liveness = self._liveness, None
        if store is None:
            return
        ranks = range(self._context.world_size)
        with ExitStack() as last:
            if liveness is not None:
                # On a busy host this cuts all connections to the store.
                last.callback(liveness.close)
            try:
                if not failed:
                    rank, limit_s = self._context.rank, self._limits.collective_s
                    store_barrier(store, "trained", rank, ranks, limit_s, self.while_leaving)
            except PacelineError:
                failed = True
                raise
            finally:
                if transport is not None:
                    transport.close(failed=failed)
            if not failed:
                store.set(f"left/{self._context.rank}", "")
                if self._context.is_first:
                    keys = [f"left/{rank}" for rank in ranks]
                    wait_for(store, keys, self._limits.rendezvous_s, "rank 0: all ranks to leave")


def join_peers(context: RankContext, trial: Trial, *, open_transport: bool = True) -> Peers:
    """Connect to the other ranks within `limits.rendezvous_s` and open the transport; collective.

    open_transport: False leaves that to a later call of `Peers.open_transport`.
    Raises TimedOut naming the absent ranks, EnvironmentLacks if hosts have different versions, if
    ranks of a node share cores without permission, or if the transport is not available.
    """
    if context.world_size == 1:
        return Peers(context, trial)
    limit_s = trial.limits.rendezvous_s
    store = open_store(context, limit_s)
    with limited(f"rank {context.rank}: rank 0's store", limit_s):
        peers = _join(context, trial, store, limit_s)
    if open_transport and peers.has_transport:
        try:
            peers.open_transport()
        except BaseException:
            peers.leave(failed=True)
            raise
    return peers


def open_store(context: RankContext, limit_s: float) -> TCPStore:
    """Connect to rank 0's store, or serve it; later waits have the same limit.

    Raises EnvironmentLacks without an address, TimedOut if the store does not answer in `limit_s`.
    """
    if context.store is None:
        raise EnvironmentLacks(
            f"rank {context.rank} of {context.world_size}: expected the address of rank 0's store, "
            "got none; start the ranks with paceline's job scripts"
        )
    return _connect(context, context.store, limit_s, context.store.listen_fd)


def open_again(context: RankContext, limit_s: float) -> TCPStore:
    """Open another connection to the store, so that a wait blocks only its own connection."""
    assert context.store is not None
    return _connect(context, context.store, limit_s)


def _connect(
    context: RankContext, address: StoreAddress, limit_s: float, listen_fd: int | None = None
) -> TCPStore:
    rank, ranks = context.rank, context.world_size
    return connect_store(address.host, address.port, rank, ranks, limit_s, listen_fd)


def _join(context: RankContext, trial: Trial, store: TCPStore, limit_s: float) -> Peers:
    store_barrier(store, "joined", context.rank, range(context.world_size), limit_s)
    joined = Peers(context, trial, store)
    hosts = gather(joined.world("hosts"), context.host, limit_s)
    if len(set(hosts)) > 1:
        check_versions(hosts, gather(joined.world("versions"), own_versions(), limit_s))
    cores = gather(joined.node("cores"), RankCores.own().to_json(), limit_s)
    check_node(context, trial.placement, [RankCores.from_json(text) for text in cores])
    clock = measure_offset(store, context, hosts, limit_s)
    transport = create_transport(trial)
    answering = open_again(context, limit_s)
    _limit_answers(store, trial)
    liveness = LivenessProbe(
        store,
        answering,
        rank=context.rank,
        hosts=hosts,
        limit_s=trial.limits.collective_s,
        interface=trial.interface,
    )
    return Peers(context, trial, store, transport, clock, liveness)


def _limit_answers(store: TCPStore, trial: Trial) -> None:
    """Apply the limit of a collective to all connections to the store.

    Call it after `open_again`, which applies the limit of its own connection to all of them.
    """
    limit_answers(store, trial.limits.collective_s * ANSWER_SHARE)


def measure_offset(
    store: Store,
    context: RankContext,
    hosts: Sequence[str],
    limit_s: float,
    now: Callable[[], float] = time.time,
) -> ClockOffset:
    """Measure the offset; collective over all ranks. It is exactly 0 on rank 0's host, which has
    the same clock. hosts: by rank."""
    if context.is_first:
        for rank, host in enumerate(hosts):
            if host != context.host:
                _answer(store, rank, limit_s, now)
        return SAME_CLOCK
    if context.host == hosts[0]:
        return SAME_CLOCK
    return best_offset([_ask(store, context.rank, n, limit_s, now) for n in range(_ROUNDS)])


def _ask(
    store: Store, rank: int, number: int, limit_s: float, now: Callable[[], float]
) -> tuple[float, float, float]:
    if number == 0:  # ranks are served in turn, so wait for the turn before the first round
        wait_for(store, [f"clock/turn/{rank}"], limit_s, f"rank {rank}: its turn to read the clock")
    key = f"clock/answer/{rank}/{number}"
    asked = now()
    put(store, f"clock/question/{rank}/{number}", "?")
    with limited(f"rank {rank}: rank 0's clock", limit_s):
        store.wait([key], timedelta(seconds=limit_s))  # `wait_for` wakes a thread, which takes time
    answered = now()
    return asked, float(take(store, key)), answered


def _answer(store: Store, rank: int, limit_s: float, now: Callable[[], float]) -> None:
    store.set(f"clock/turn/{rank}", "")
    for number in range(_ROUNDS):
        wait_for(store, [f"clock/question/{rank}/{number}"], limit_s, f"rank {rank}'s question")
        put(store, f"clock/answer/{rank}/{number}", repr(now()))


# Versions that ranks on several hosts must share: they decide what is computed and sent. Other
# differences, such as that of NumPy or of a release of Python, are stated in the report.


def own_versions() -> str:
    """Return the versions of this rank, for `check_versions` on every rank."""
    return json.dumps({"Paceline": __version__, "torch": torch.__version__})


def check_versions(hosts: Sequence[str], versions: Sequence[str]) -> None:
    """Raise EnvironmentLacks if the hosts have different versions. hosts, versions: by rank."""
    found: dict[str, dict[str, dict[str, None]]] = defaultdict(lambda: defaultdict(dict))
    for host, text in zip(hosts, versions, strict=True):
        for name, version in json.loads(text).items():
            found[name][version][host] = None
    differing = [
        f"{name} {', '.join(f'{version} on {_listed(on)}' for version, on in values.items())}"
        for name, values in found.items()
        if len(values) > 1
    ]
    if differing:
        raise EnvironmentLacks(
            f"expected equal versions on all hosts, found {'; '.join(differing)}; install the same "
            "environment at the same path on every host (`paceline doctor` compares several hosts)"
        )


def _listed(hosts: dict[str, None]) -> str:
    return " and ".join(hosts)
