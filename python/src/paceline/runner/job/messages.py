"""Messages of a job script on standard error, and its exit code after an error."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable

from paceline.base.errors import ExitCode, PacelineError
from paceline.base.host.messages import say, show_warning


def run_guarded(main: Callable[[], int]) -> int:
    """Run a job script's `main` and return its exit code; a PacelineError gets no stack trace."""
    warnings.showwarning = show_warning
    try:
        return main()
    except PacelineError as error:
        say(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        say("interrupted")
        return ExitCode.INTERRUPTED
    except Exception as error:  # noqa: BLE001  (the stack trace goes to the log)
        traceback.print_exc()
        say(f"unexpected {type(error).__name__}: {error}; see the stack trace above")
        return ExitCode.RANK_FAILED
