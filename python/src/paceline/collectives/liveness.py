"""Find out which ranks are missing when a collective fails or exceeds its limit.

A transport often knows only that nothing arrived. Each rank therefore has a second connection to
rank 0's store, and a thread that answers probes whatever the training does. So a rank that is alive
can be distinguished from one that is gone, frozen or disconnected. In addition, each rank that
fails publishes its reason.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist

from paceline.collectives.errors import EnvironmentLacks, PeerLost, RankFailed, TimedOut
from paceline.collectives.host import has_link, wait_until
from paceline.collectives.store import cut, limit_answers, put, take
from paceline.collectives.torch_internals import TCPStore

# Share of the limit for each of three waits: the store's answer, the ranks' answers, and rank 0
# waiting for other probes. All of it ends within twice the limit.
_ANSWER_SHARE = 1 / 5
# A live rank answers within milliseconds, with many more ranks than cores within 0.1 to 1 s.
_LONGEST_ANSWER_S = 2.0
_POLL_S = 0.01
_FOR_EVER = timedelta(days=365)
_CLOSE_S = 0.5
_LONGEST_TEXT = 200


@dataclass(slots=True)
class ProbeResult:
    """State of the other ranks when `caller` probed them. Ranks in none of the lists did not
    answer."""

    caller: int
    hosts: Sequence[str]
    waiting: list[int] = field(default_factory=list)  # they wait for other ranks, like the caller
    busy: list[int] = field(default_factory=list)  # they answered, and have not failed so far
    failed: dict[int, str] = field(default_factory=dict)  # with the reason that they published
    server: str | None = None  # why rank 0's store could not be queried completely
    dead_link: str | None = None  # this host's interface, if it is down

    @property
    def silent(self) -> list[int]:
        """Ranks that did not answer. Without the store, only rank 0 was probed."""
        if self.server is not None:
            return [0]
        known = {self.caller, *self.waiting, *self.busy, *self.failed}
        return [rank for rank in range(len(self.hosts)) if rank not in known]

    @property
    def culprit(self) -> int | None:
        """The rank that is the cause, if there is exactly one candidate."""
        candidates = [*self.failed, *self.silent] or self.busy
        return candidates[0] if len(candidates) == 1 else None

    def words(self) -> str:
        """Return the result as clauses of a sentence."""
        clauses = []
        if self.dead_link is not None:
            here = self.hosts[self.caller]
            clauses.append(f"interface {self.dead_link} of this host ({here}) is down")
        if self.server is not None:
            clauses.append(f"{self._name([0])}, which serves the store, {self.server}")
        clauses += [f"{self._name([rank])} has failed: {why}" for rank, why in self.failed.items()]
        silent = self.silent
        if silent and self.server is None:
            verb = "does" if len(silent) == 1 else "do"
            clauses.append(
                f"{self._name(silent)} {verb} not answer: gone, frozen, or the link is down"
            )
        if self.busy:
            verb = "is" if len(self.busy) == 1 else "are"
            clauses.append(f"{self._name(self.busy)} {verb} alive, but not at this operation")
        if self.waiting:
            verb = "waits" if len(self.waiting) == 1 else "wait"
            clauses.append(f"{self._name(self.waiting)} {verb} as well")
        return "; ".join(clauses)

    def _name(self, ranks: list[int]) -> str:
        named = ", ".join(f"{rank} ({self.hosts[rank]})" for rank in sorted(ranks))
        return f"rank{'s' if len(ranks) > 1 else ''} {named}"


class LivenessProbe:
    """Answers probes of other ranks from construction until it is closed, and probes them."""

    def __init__(
        self,
        store: TCPStore,
        answering: TCPStore,
        *,
        rank: int,
        hosts: Sequence[str],
        limit_s: float,
        interface: str,
    ) -> None:
        """answering: a store connection for this object alone. hosts: by rank.

        limit_s: limit of a collective. A probe takes a share of it, at most 2 s per wait.
        """
        self._store = store
        self._answering = answering
        self._rank = rank
        self._hosts = hosts
        self._interface = interface
        self._answer_s = min(limit_s * _ANSWER_SHARE, _LONGEST_ANSWER_S)
        self._found: ProbeResult | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._answer, name="liveness", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # the thread must not run while Python shuts down

    def announce(self, why: str) -> None:
        """Publish that this rank fails for a reason of its own; does not wait."""
        self._leave_word(f"failed/{self._rank}", why)

    def call(self, doing: str) -> ProbeResult:
        """Probe all ranks, because this rank waited without success while `doing` something.

        It takes as long as the slowest rank needs to answer: at most 2/5 of the limit and 4 s. It
        raises nothing: a store that does not answer is a result too.
        """
        found = ProbeResult(self._rank, self._hosts)
        limit_answers(self._store, self._answer_s)
        try:
            self._leave_word(f"waiting/{self._rank}", doing)
            self._ask(found)
            self._leave_word(f"told/{self._rank}", "")
        except dist.DistError as error:
            timed_out = "timeout" in str(error).lower()
            found.server = (
                "does not answer: gone, frozen, or the link is down" if timed_out else "has gone"
            )
        if (found.silent or found.server) and not has_link(self._interface):
            found.dead_link = self._interface
        self._found = found
        return found

    def close(self) -> None:
        """Stop answering. Rank 0, which serves the store, first lets other ranks probe.

        Ranks that were busy at its own probe are among them: if they reach the operation a little
        later, they wait in vain a little later.
        """
        if self._closing:
            return
        if self._rank == 0 and self._found is not None:
            self._let_others_ask([*self._found.waiting, *self._found.busy])
        self._closing = True
        atexit.unregister(self.close)
        self._leave_word(f"call/{self._rank}", "")  # wakes the thread
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            cut(self._answering)  # the wake-up message was lost
            self._thread.join(_CLOSE_S)

    def _answer(self) -> None:
        call, here = _key(f"call/{self._rank}"), _key(f"here/{self._rank}")
        try:
            while True:
                self._answering.wait([call], _FOR_EVER)
                if self._closing:
                    return
                self._answering.delete_key(call)
                self._answering.add(here, 1)
        except dist.DistError:
            return  # the store has gone, so no probe can arrive

    def _ask(self, found: ProbeResult) -> None:
        others = [rank for rank in range(len(self._hosts)) if rank != self._rank]
        before = {rank: self._store.add(_key(f"here/{rank}"), 0) for rank in others}
        for rank in others:
            self._store.set(_key(f"call/{rank}"), "")
        answered: set[int] = set()
        deadline = time.monotonic() + self._answer_s
        while True:
            for rank in [r for r in others if r not in found.waiting and r not in found.failed]:
                self._look_at(found, rank)
                if self._store.add(_key(f"here/{rank}"), 0) > before[rank]:
                    answered.add(rank)
            known = answered.union(found.waiting, found.failed)
            found.busy = sorted(answered.difference(found.waiting, found.failed))
            if len(known) == len(others) or time.monotonic() > deadline:
                return
            time.sleep(_POLL_S)

    def _look_at(self, found: ProbeResult, rank: int) -> None:
        """Read what a rank has published."""
        if self._store.check([_key(f"failed/{rank}")]):
            found.failed[rank] = self._word(f"failed/{rank}")
        elif self._store.check([_key(f"waiting/{rank}")]):
            found.waiting.append(rank)

    def _word(self, name: str) -> str:
        try:
            return take(self._store, _key(name))
        except EnvironmentLacks as error:
            return str(error)

    def _let_others_ask(self, ranks: list[int]) -> None:
        keys = [_key(f"told/{rank}") for rank in ranks]
        with suppress(dist.DistError):  # then the others cannot probe either
            wait_until(lambda: not keys or self._store.check(keys), self._answer_s, _POLL_S)

    def _leave_word(self, name: str, text: str) -> None:
        try:
            put(self._store, _key(name), text[:_LONGEST_TEXT])
        except dist.DistError:
            return  # a probe will find out that the store has gone


def _key(name: str) -> str:
    return f"liveness/{name}"


def with_probe_result(error: TimedOut | RankFailed, found: ProbeResult) -> TimedOut | RankFailed:
    """Add the result of a probe to an error; PeerLost if another rank is the cause.

    A time-out remains a time-out, because either the peer or the limit may be the cause.
    """
    message = f"{error}. Liveness probe: {found.words()}"
    if isinstance(error, TimedOut):
        return TimedOut(message)
    if isinstance(error, PeerLost) or found.silent or found.failed:
        return PeerLost(message, error.rank if found.culprit is None else found.culprit)
    return RankFailed(message, error.rank)
