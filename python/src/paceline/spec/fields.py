"""Types of spec values that several tables and extensions share."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

PositiveInt = Annotated[int, Field(ge=1)]
PositiveFloat = Annotated[float, Field(gt=0, strict=False)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
Count = PositiveInt | Literal["auto"]  # "auto": as the local strategy decides
FROM_LIST: Any = Field(strict=False)  # for tuples: TOML's arrays are lists
