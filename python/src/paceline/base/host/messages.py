"""Messages on standard error: of the command line, and of job scripts."""

from __future__ import annotations

import sys
from typing import TextIO

from paceline.base.errors import PacelineWarning


def say(text: str) -> None:
    """Print a message beside the output, at once."""
    print(f"paceline: {text}", file=sys.stderr, flush=True)


def show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Show a warning of Paceline's, in place of `warnings.showwarning`.

    Those of libraries do not help the user; python -W error still shows them.
    """
    del filename, lineno, file, line  # ours are about the machine, not about a line of code
    if issubclass(category, PacelineWarning):
        say(f"warning: {message}")
