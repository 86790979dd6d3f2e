"""The phases of a trial and of a step: the one list that every reader of records uses."""

from __future__ import annotations

from dataclasses import dataclass

Phases = dict[str, float | None]  # seconds by phase name; None where there is nothing to measure


@dataclass(frozen=True, slots=True)
class Phase:
    """One phase of a rank's time; `in_step` phases repeat in every step."""

    name: str
    label: str
    meaning: str
    in_step: bool = True


# in the order of time
ALL_PHASES = (
    Phase("launch", "launch", "launch command to start of the rank's process", in_step=False),
    Phase("imports", "imports", "interpreter start to all modules imported", in_step=False),
    Phase(
        "data_load",
        "data loading",
        "opening the data set; in memory mode also decoding it",
        in_step=False,
    ),
    Phase("data_wait", "data wait", "waiting for the batch of a step"),
    Phase("forward", "forward", "forward pass and loss"),
    Phase("backward", "backward", "backward pass, until this rank's last gradient is ready"),
    Phase("bubble", "pipeline bubbles", "a pipeline stage waiting for its neighbours"),
    Phase(
        "comm_wait",
        "waiting for the slowest rank",
        "from this rank's last gradient to the slowest rank's last gradient, and within the passes "
        "where layers communicate",
    ),
    Phase(
        "comm_transfer",
        "transfer and summation",
        "the rest of the exposed communication: of gradients, and of layers within the passes",
    ),
    Phase("optimizer", "optimiser", "optimiser step"),
    Phase(
        "other",
        "other",
        "rendezvous, model building, writing results, and time that no other phase covers",
    ),
    Phase("teardown", "teardown", "end of the rank's work to exit of the launcher", in_step=False),
)
PHASES = tuple(phase.name for phase in ALL_PHASES)
STEP_PHASES = tuple(phase.name for phase in ALL_PHASES if phase.in_step)
LABELS = {phase.name: phase.label for phase in ALL_PHASES}
# What one rank can measure by itself: waiting and transfer are separated only by comparing ranks.
RANK_STEP_PHASES = ("data_wait", "forward", "backward", "bubble", "comm", "optimizer", "other")
# Spans whose time is counted in "other"
OTHER_SPANS = ("rendezvous", "model_build", "restore", "evaluation", "bookkeeping", "replay")


# Points of a training at which its weights are compared with the baseline's, and its roundings
#
# Every training has its final weights. One with more steps than `EARLY_STEPS` also has those after
# that many. Over more than `LONG_STEPS` steps rounding alone may move weights apart, so long
# trainings replay a few steps from states of the baseline: of its middle and its end.

# A gradient is nothing but roundings if they change it by so large a share of itself.
ROUNDING_ONLY = 0.1
# Share of the norm of all tensors below which the gradient of one tensor is noise.
NOISE_SHARE = 2.0**-13
# By more of its norm no gradient of the first step may differ, however rounding changes it.
MOST_DIFFERENCE = 0.5

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
