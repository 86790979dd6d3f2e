"""The exception tree and the exit codes. This module imports nothing else of the package.

PacelineError           1  an internal error
├── UsageError          2  wrong command line or wrong spec
├── EnvironmentLacks    3  the machine or the cluster lacks something that the trial needs
├── DataError           4  an image, a data set or a record is bad or missing
├── RankFailed          5  a rank failed or was killed
├── TimedOut            6  a wait reached its limit
└── NotComparable       7  the trials are not the same training

`paceline compare --fail-slower` ends with 8 if a run is slower than allowed, and with 9 if it did
not train the same.

A message says what is wrong, what was expected, what to do, and where to look. `cli` prints the
message without a stack trace and exits with `exit_code`.
"""

from enum import IntEnum


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


class PacelineWarning(UserWarning):
    """A warning for the user that does not stop the work."""


class PacelineError(Exception):
    """Base class of all errors that a user can meet. The message is written for the user."""

    exit_code: ExitCode = ExitCode.INTERNAL


class UsageError(PacelineError):
    """The command line or the spec asks for something that does not exist or cannot work."""

    exit_code = ExitCode.USAGE


class EnvironmentLacks(PacelineError):  # noqa: N818  (reads as the sentence the user sees)
    """The machine, the cluster or the installation lacks something that the trial needs."""

    exit_code = ExitCode.ENVIRONMENT


class DataError(PacelineError):
    """An image, a data set or a record is missing, damaged, or not in the expected format."""

    exit_code = ExitCode.DATA


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


class TimedOut(PacelineError):  # noqa: N818
    """A wait reached its limit."""

    exit_code = ExitCode.TIMED_OUT


class NotComparable(PacelineError):  # noqa: N818
    """The trials cannot be compared, because they are not the same training."""

    exit_code = ExitCode.NOT_COMPARABLE
