"""Consoles that print text as it is.

Rich reads `[name]` as markup and `:name:` as an emoji. Paths, spec keys and messages of other
programs contain both, so markup is off and styles are given as arguments.
"""

from __future__ import annotations

from rich.console import Console


def plain_console(*, stderr: bool = False) -> Console:
    """Return a console for standard output or standard error without markup."""
    return Console(stderr=stderr, markup=False, emoji=False, highlight=False)
