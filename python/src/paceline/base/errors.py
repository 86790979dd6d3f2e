"""The exception tree and the exit codes.

`collectives` raises some of these errors and imports nothing else of the package, so their classes
and those of their exit codes are there.

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

from paceline.collectives.errors import (
    CallsDiffer,
    EnvironmentLacks,
    ExitCode,
    PacelineError,
    PeerLost,
    RankFailed,
    TimedOut,
    UsageError,
)

__all__ = [
    "CallsDiffer",
    "DataError",
    "EnvironmentLacks",
    "ExitCode",
    "NotComparable",
    "PacelineError",
    "PacelineWarning",
    "PeerLost",
    "RankFailed",
    "StepsDiffer",
    "TimedOut",
    "UsageError",
]


class PacelineWarning(UserWarning):
    """A warning for the user that does not stop the work."""


class StepsDiffer(RankFailed):
    """Ranks of a script take different numbers of steps: one waits for another that has ended."""


class DataError(PacelineError):
    """An image, a data set or a record is missing, damaged, or not in the expected format."""

    exit_code = ExitCode.DATA


class NotComparable(PacelineError):  # noqa: N818
    """The trials cannot be compared, because they are not the same training."""

    exit_code = ExitCode.NOT_COMPARABLE
