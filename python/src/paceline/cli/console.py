"""Output of commands: JSON, and consoles that print text without changes.

Rich reads `[name]` as markup and `:name:` as an emoji. Paths, spec keys and messages of other
programs contain both, so markup is off and styles are given as arguments.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

from rich.console import Console

if TYPE_CHECKING:
    from collections.abc import Mapping


def print_json(document: Mapping[str, Any]) -> None:
    """Print a document for other programs."""
    json.dump(document, sys.stdout, indent=1)
    print()


def plain_console(*, stderr: bool = False) -> Console:
    """Return a console for standard output or standard error without markup."""
    return Console(stderr=stderr, markup=False, emoji=False, highlight=False)
