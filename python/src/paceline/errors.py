"""The exception tree and the exit codes; knows nothing else of the package.

PacelineError
├── UsageError          2  wrong command line, wrong spec
├── EnvironmentLacks    3  the machine or cluster lacks something the trial needs
├── DataError           4  a photo, data set or manifest is bad or missing
│   └── UntrustedDataError   opening it would run what a stranger wrote
├── RankFailed          5  a rank ended otherwise than asked
├── TimedOut            6  a wait with a limit reached it
└── NotComparable       7  the trials are not the same training

A message says what was expected, what came, how to mend it, and where to look. `cli` prints it
without a stack trace and exits with `exit_code`.
"""

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of every Paceline command, part of the command line contract."""

    OK = 0
    INTERNAL = 1
    USAGE = 2
    ENVIRONMENT = 3
    DATA = 4
    RANK_FAILED = 5
    TIMED_OUT = 6
    NOT_COMPARABLE = 7
    INTERRUPTED = 130
    TERMINATED = 143


class PacelineWarning(UserWarning):
    """Something the user should know that does not stop the work."""


class PacelineError(Exception):
    """Base of all errors a user can meet; the message is written for the user."""

    exit_code: ExitCode = ExitCode.INTERNAL


class UsageError(PacelineError):
    """The command line or the spec asks for something that does not exist or cannot work."""

    exit_code = ExitCode.USAGE


class EnvironmentLacks(PacelineError):  # noqa: N818  (reads as the sentence the user sees)
    """The machine, cluster or installation lacks something that the trial needs."""

    exit_code = ExitCode.ENVIRONMENT


class DataError(PacelineError):
    """A photo, a data set or a manifest is missing, damaged or not what it says."""

    exit_code = ExitCode.DATA


class UntrustedDataError(DataError):
    """Opening this data set would run code that nobody vouched for."""


class RankFailed(PacelineError):  # noqa: N818
    """A rank ended with an error, or was killed."""

    exit_code = ExitCode.RANK_FAILED

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class TimedOut(PacelineError):  # noqa: N818
    """A wait reached its limit."""

    exit_code = ExitCode.TIMED_OUT


class NotComparable(PacelineError):  # noqa: N818
    """Trials that were to be compared are not the same training."""

    exit_code = ExitCode.NOT_COMPARABLE
