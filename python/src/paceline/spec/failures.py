"""[failures]: ranks that the run itself kills, to measure what a failure costs."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from paceline.spec.fields import PositiveFloat, PositiveInt


class FailureSettings(BaseModel):
    """[failures]: a rank of each trial gets SIGKILL at random times, drawn from the seed.

    mean_s: mean of the exponential time from a step of all ranks to the next failure; the times
    and ranks are the same in every trial of a repeat. count: failures of a trial.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    mean_s: PositiveFloat
    count: PositiveInt = 1
