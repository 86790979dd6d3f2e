"""Options of commands that are numbers."""

from __future__ import annotations

import argparse
import math
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

Number = TypeVar("Number", int, float)


def number(
    kind: type[Number], expected: str, is_allowed: Callable[[Number], bool]
) -> Callable[[str], Number]:
    """Return a parser for argparse of a finite number that is allowed.

    expected: what a message says was expected.
    """

    def parse(text: str) -> Number:
        with suppress(ValueError, OverflowError):
            value = kind(text)
            if math.isfinite(value) and is_allowed(value):
                return value
        raise argparse.ArgumentTypeError(f"expected {expected}, got {text}")

    return parse


def _is_positive(value: float) -> bool:
    return value > 0


count = number(int, "a whole number of at least 1", lambda value: value >= 1)
seed = number(int, "a whole number of at least 0", lambda value: value >= 0)
seconds = number(float, "seconds above 0", _is_positive)
positive = number(float, "a number above 0", _is_positive)
