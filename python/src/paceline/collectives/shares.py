"""Equal shares of a row of elements, for the ranks of a job or of a node."""

from __future__ import annotations


def share_bounds(length: int, share: int, shares: int) -> tuple[int, int]:
    """Return the half-open bounds of one of equal shares; the first ones get the remainder."""
    base, extra = divmod(length, shares)
    low = share * base + min(share, extra)
    return low, low + base + (1 if share < extra else 0)
