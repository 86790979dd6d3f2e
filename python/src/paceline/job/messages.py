"""What a job script says on standard error, and how an error becomes its exit code."""

from __future__ import annotations

import sys
import traceback
import warnings
from typing import TYPE_CHECKING, TextIO

from paceline.errors import ExitCode, PacelineError, PacelineWarning

if TYPE_CHECKING:
    from collections.abc import Callable


def say(text: str) -> None:
    """One message of ours on standard error, at once."""
    print(f"paceline: {text}", file=sys.stderr, flush=True)


def rank_failed_line(rank: int, ranks: int, error: str) -> str:
    """The line by which `launch` knows the failed rank (launch.base.OWN_FAILURE)."""
    return f"rank {rank} of {ranks} failed: {error}"


def run_guarded(main: Callable[[], int]) -> int:
    """Run a job script's `main`; a user's mistake is told without a stack trace."""
    warnings.showwarning = _show_warning
    try:
        return main()
    except PacelineError as error:
        say(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        say("interrupted")
        return ExitCode.INTERRUPTED
    except Exception as error:  # noqa: BLE001  (the last resort; the trace goes to the log)
        traceback.print_exc()
        say(f"unexpected {type(error).__name__}: {error}; the trace above tells where")
        return ExitCode.RANK_FAILED


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    del filename, lineno, file, line  # our warnings are about the machine, not about a line
    if issubclass(category, PacelineWarning):
        say(f"warning: {message}")
