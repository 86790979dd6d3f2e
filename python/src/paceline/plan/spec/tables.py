"""Tables of a spec that the training reads, too: [checkpoint], [failures] and targets."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from paceline.plan.spec.values import PositiveFloat, PositiveInt


class SpecTable(BaseModel):
    """A table of a spec: no unknown keys, and no value is converted silently."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class CheckpointSettings(SpecTable):
    """[checkpoint]: a checkpoint every so many steps.

    keep: keep the newest checkpoints of a trial that has ended well.
    """

    every_steps: PositiveInt
    keep: bool = False


FailureKind = Literal["rank", "executor", "host"]


class FailureSettings(SpecTable):
    """[failures]: a part of each trial gets SIGKILL at random times, drawn from the seed.

    mean_s: mean of the exponential time from a step of all ranks to the next failure; the times
    and ranks are the same in every trial of a repeat. count: failures of a trial. kinds: what is
    killed, in turn: a rank, the executor that holds it, or all processes of its host in a lab,
    whose link is down for host_down_s seconds. A trial skips kinds that it does not have.
    """

    mean_s: PositiveFloat
    count: PositiveInt = 1
    kinds: tuple[FailureKind, ...] = Field(default=("rank",), min_length=1, strict=False)
    host_down_s: PositiveFloat = 5.0


# Values of [training] and [[workloads]] that belong to evaluations; the first one enables them.
EVALUATION_KEYS = ("held_out_samples", "evaluate_every_steps", "evaluate_every_epochs", "target")
Bound = Annotated[float, Field(strict=False, allow_inf_nan=False)]


class Target(SpecTable):
    """A bound of a metric of `Task.evaluate`: `{ metric = "accuracy", at_least = 0.9 }`."""

    metric: Annotated[str, Field(min_length=1)]
    at_least: Bound | None = None
    at_most: Bound | None = None

    @model_validator(mode="after")
    def _one_bound(self) -> Self:
        if (self.at_least is None) == (self.at_most is None):
            raise ValueError("target: expected either at_least or at_most")
        return self

    def reached(self, value: float) -> bool:
        """Return whether a value of the metric meets the target; NaN does not."""
        if self.at_least is not None:
            return value >= self.at_least
        return self.at_most is not None and value <= self.at_most

    @property
    def words(self) -> str:
        """The target for a sentence, for example `accuracy of at least 0.9`."""
        if self.at_least is not None:
            return f"{self.metric} of at least {self.at_least:g}"
        return f"{self.metric} of at most {self.at_most:g}"
