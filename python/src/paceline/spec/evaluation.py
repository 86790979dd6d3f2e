"""The quality that a training is to reach on samples that it never sees."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

# Values of [training] and [[workloads]] that belong to evaluations; the first one enables them.
EVALUATION_KEYS = ("held_out_samples", "evaluate_every_steps", "evaluate_every_epochs", "target")
Bound = Annotated[float, Field(strict=False, allow_inf_nan=False)]


class Target(BaseModel):
    """A bound of a metric of `Task.evaluate`: `{ metric = "accuracy", at_least = 0.9 }`."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

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
