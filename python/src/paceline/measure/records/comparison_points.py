"""Points of a training at which its weights are compared with the baseline's, and its roundings.

Every training has its final weights. One with more steps than `EARLY_STEPS` also has those after
that many. Over more than `LONG_STEPS` steps rounding alone may move weights apart, so long
trainings replay a few steps from states of the baseline: of its middle and its end.
"""

from __future__ import annotations

# Unit roundoff of each arithmetic (IEEE 754), see `Training.arithmetic`; of bf16 the average one.
ROUNDOFF = {
    "fp32": 2.0**-24,
    "fp32 high": 2.0**-11,
    "fp32 medium": 2.0**-9,
    "fp16": 2.0**-11,
    "bf16": 2.0**-9,
}

EARLY_STEPS = 16
LONG_STEPS = 64
REPLAYED_STEPS = 2

GRADIENT, EARLY, FINAL = "gradient", "step16", "final"


def replayed_after(steps: int) -> tuple[int, ...]:
    """Return after how many steps the replays of a training of `steps` steps begin."""
    return (steps // 2, steps - REPLAYED_STEPS) if steps > LONG_STEPS else ()


def kept_after(steps: int) -> tuple[int, ...]:
    """Return after how many steps of `steps` weights or states are kept for a comparison."""
    early = (EARLY_STEPS,) if steps > EARLY_STEPS else ()
    return early + replayed_after(steps)


def replay_point(first_step: int) -> str:
    """Return the name of the replay that begins with `first_step`."""
    return f"replay{first_step}"
