"""Messages of Open MPI about failed ranks, and about lost ranks and hosts.

Its ranks may run under several launchers, so the messages may be in every launcher's log. Their
texts are in help-mpi-errors.txt of Open MPI 5 and help-errmgr-base.txt of PRRTE 3.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.measure.records.rows import RankStatus
from paceline.runner.launchers.base import first_named

_OWN_ABORT = re.compile(r"MPI_ABORT was invoked on rank (\d+)")
_FAILURES = (
    re.compile(r"prterun noticed that process rank (\d+)"),
    _OWN_ABORT,
    re.compile(r"exited due to process rank (\d+)"),
    re.compile(r"Process name: \[[^\]]*,(\d+)\]"),
)
# Open MPI ends a rank at once when the connection to a rank of another host is closed. Later ranks
# that say the same are only counted, but mpirun may name one of them as the one that ended the job.
_LOST_PEER = re.compile(r"An error occurred .*Socket closed\n.*reported by process \[\d+,(\d+)\]")
_ABORTED = re.compile(r"exited due to process rank (\d+) [^\n]* calling\s+\"abort\"")
# mpirun itself then ends with status 0. The second message appears if the remote shell of the
# daemon ends first.
_LOST_DAEMON = re.compile(
    r"(?s)Remote daemon:\s+\[\S+\] on node (?P<lost>\S+)"
    r"|A daemon failed to report back.*?Remote host:\s+(?P<left>\S+)"
)


@dataclass(frozen=True, slots=True)
class LostHost:
    """A host that mpirun has lost."""

    name: str
    ranks: tuple[int, ...]  # that ran there; none if mpirun has another name for it


def failed_rank(log_text: str) -> int | None:
    """Return the rank that mpirun's output names as the first to fail."""
    return first_named(_FAILURES, log_text)


def ranks_without_peer(log_text: str) -> tuple[int, ...]:
    """Return the known ranks that ended because they lost a rank of another host, in order."""
    first = _LOST_PEER.search(log_text)
    if first is None:
        return ()
    aborted = None if _OWN_ABORT.search(log_text) else _ABORTED.search(log_text)
    return tuple(int(found.group(1)) for found in (first, aborted) if found)


def lost_host(log_text: str, statuses: Sequence[RankStatus]) -> LostHost | None:
    """Return the host whose daemon mpirun has lost; None if it lost none."""
    found = _LOST_DAEMON.search(log_text)
    if found is None:
        return None
    name = found["lost"] or found["left"]
    ranks = (s.rank for s in statuses if _short(s.host) == _short(name))
    return LostHost(name, tuple(ranks))


def _short(host: str) -> str:
    return host.partition(".")[0]
