"""Rates of links, as users write them."""

from __future__ import annotations

import re

from paceline.errors import UsageError

_RATE = re.compile(r"(\d+(?:\.\d+)?)([kmg]?)bit")
_BITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}


def bits_per_s(rate: str) -> float:
    """Parse a rate in the format of tc(8). Raises UsageError for others, and below 64 kbit."""
    found = _RATE.fullmatch(rate)
    bits = float(found[1]) * _BITS[found[2]] if found else 0.0
    if bits < 64e3:
        raise UsageError(
            f'bandwidth: expected a rate such as "1gbit" or "100mbit" of at least 64kbit, '
            f"got {rate!r}"
        )
    return bits
