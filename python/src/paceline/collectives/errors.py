"""Errors that the exchange of tensors raises, their base, and the exit codes of all commands.

`paceline.base.errors` has the whole tree.
"""

import re
from enum import IntEnum

# Texts with which Gloo, NCCL and c10d report a time-out.
TIMED_OUT = re.compile(r"timed? ?out", re.IGNORECASE)


class ExitCode(IntEnum):
    """Exit codes of all Paceline commands. They are part of the command line contract."""

    OK = 0
    INTERNAL = 1
    USAGE = 2
    ENVIRONMENT = 3
    DATA = 4
    RANK_FAILED = 5
    TIMED_OUT = 6
    NOT_COMPARABLE = 7
    SLOWER = 8
    NOT_EQUIVALENT = 9
    INTERRUPTED = 130
    TERMINATED = 143

    @property
    def meaning(self) -> str:
        """A few words for `paceline --help`."""
        return _MEANINGS[self]


# A process that ends because of a signal exits with 128 plus the number of the signal.
_MEANINGS = {
    ExitCode.OK: "done",
    ExitCode.INTERNAL: "internal error",
    ExitCode.USAGE: "wrong usage or spec",
    ExitCode.ENVIRONMENT: "environment lacks something",
    ExitCode.DATA: "bad data",
    ExitCode.RANK_FAILED: "a rank failed",
    ExitCode.TIMED_OUT: "timed out",
    ExitCode.NOT_COMPARABLE: "not comparable",
    ExitCode.SLOWER: "slower than allowed",
    ExitCode.NOT_EQUIVALENT: "not equivalent",
    ExitCode.INTERRUPTED: "interrupted (SIGINT)",
    ExitCode.TERMINATED: "terminated (SIGTERM)",
}


class PacelineError(Exception):
    """Base class of all errors that a user can meet. The message is written for the user."""

    exit_code: ExitCode = ExitCode.INTERNAL


class UsageError(PacelineError):
    """The command line or the spec asks for something that does not exist or cannot work."""

    exit_code = ExitCode.USAGE


class EnvironmentLacks(PacelineError):  # noqa: N818  (reads as the sentence the user sees)
    """The machine, the cluster or the installation lacks something that the trial needs."""

    exit_code = ExitCode.ENVIRONMENT


class RankFailed(PacelineError):  # noqa: N818
    """A rank ended with an error, or was killed."""

    exit_code = ExitCode.RANK_FAILED

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class PeerLost(RankFailed):
    """A peer ended while this rank waited for it: the cause is on another rank."""

    def __init__(self, message: str, rank: int | None = None, *, loss: str = "") -> None:
        """loss: who ended first and how, for peers that this rank makes end: "rank 2 has died"."""
        super().__init__(message, rank)
        self.loss = loss


class CallsDiffer(RankFailed):
    """Ranks of a group called different collectives at the same time: all of them get this."""


class Refused(Exception):  # noqa: N818  (reads as the outcome of a call)
    """A call whose arguments cannot work has begun nothing, so the group goes on.

    Its cause is the error for the user.
    """


class TimedOut(PacelineError):  # noqa: N818
    """A wait reached its limit."""

    exit_code = ExitCode.TIMED_OUT


def timed_out(operation: str, rank: int, limit_s: float) -> TimedOut:
    """Return a TimedOut error. operation: with the name of its library, for example "MPI
    allreduce"."""
    return TimedOut(
        f"rank {rank}: {operation} did not end within {limit_s:g} s (limits.collective_s): "
        "a peer did not take part or is blocked; look at the other ranks' logs"
    )
