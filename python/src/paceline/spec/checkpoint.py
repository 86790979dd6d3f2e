"""[checkpoint]: when a training writes its state, so that it can continue after a failure."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, model_validator

from paceline.spec.fields import PositiveFloat, PositiveInt


class CheckpointSettings(BaseModel):
    """[checkpoint]: a checkpoint every so many steps, or seconds, or both.

    "auto" seconds: Daly's interval for a mean time between failures of `mtbf_s`, from the measured
    cost of a checkpoint. keep: keep the newest checkpoints of a trial that has ended well.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    every_steps: PositiveInt | None = None
    every_s: PositiveFloat | Literal["auto"] | None = None
    mtbf_s: PositiveFloat | None = None
    keep: bool = False

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.every_steps is None and self.every_s is None:
            raise ValueError("checkpoint: expected every_steps or every_s, got neither")
        if self.every_s == "auto" and self.mtbf_s is None:
            raise ValueError(
                'checkpoint: every_s = "auto" needs mtbf_s, the mean time between failures in '
                "seconds"
            )
        if self.mtbf_s is not None and self.every_s != "auto":
            raise ValueError('checkpoint: mtbf_s applies to every_s = "auto" only')
        return self
