"""The best time between two checkpoints.

Rare checkpoints lose much work with each failure, frequent ones cost time. J. W. Young (A First
Order Approximation to the Optimum Checkpoint Interval, CACM 17(9), 1974) balances both: the square
root of 2 x cost x mean time between failures. J. T. Daly (A Higher Order Estimate of the Optimum
Checkpoint Interval for Restart Dumps, FGCS 22(3), 2006, equation 37) adds two terms for failures
that are not rare. Both assume independent failures at a constant rate.
"""

from __future__ import annotations

import math


def daly_interval_s(cost_s: float, mtbf_s: float) -> float:
    """Return Daly's interval, from the end of a checkpoint to the start of the next.

    cost_s: time by which a checkpoint delays the training.
    """
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    share = cost_s / (2 * mtbf_s)
    root = math.sqrt(2 * cost_s * mtbf_s)
    return root * (1 + math.sqrt(share) / 3 + share / 9) - cost_s
