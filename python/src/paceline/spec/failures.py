"""[failures]: what the run itself kills, to measure what a failure costs."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from paceline.spec.fields import PositiveFloat, PositiveInt

FailureKind = Literal["rank", "executor", "host"]


class FailureSettings(BaseModel):
    """[failures]: a part of each trial gets SIGKILL at random times, drawn from the seed.

    mean_s: mean of the exponential time from a step of all ranks to the next failure; the times
    and ranks are the same in every trial of a repeat. count: failures of a trial. kinds: what is
    killed, in turn: a rank, the executor that holds it, or all processes of its host in a lab,
    whose link is down for host_down_s seconds. A trial skips kinds that it does not have.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    mean_s: PositiveFloat
    count: PositiveInt = 1
    kinds: tuple[FailureKind, ...] = Field(default=("rank",), min_length=1, strict=False)
    host_down_s: PositiveFloat = 5.0
