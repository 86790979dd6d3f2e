"""The methods of gradient compression, with their keys and numbers."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from paceline.plan.spec.descriptors import Compression, KeyModel
from paceline.plan.spec.models import TrialRequest
from paceline.plan.spec.values import PositiveInt

DEFAULT_POWERSGD_RANK = 4  # as Vogels et al. (PowerSGD, NeurIPS 2019) use for language models
DEFAULT_DENSITY = 0.01  # Lin et al. (Deep Gradient Compression, ICLR 2018) send 0.1 to 1 %


class PowerSgdKeys(KeyModel):
    """Keys of `powersgd`."""

    compression_rank: PositiveInt | None = None  # of the approximation


class TopKKeys(KeyModel):
    """Keys of `topk`."""

    # part of the elements that is sent
    compression_density: Annotated[float, Field(gt=0, le=1, strict=False)] | None = None


def _powersgd_numbers(request: TrialRequest) -> dict[str, int | float]:
    return {"rank": request.keys(PowerSgdKeys).compression_rank or DEFAULT_POWERSGD_RANK}


def _topk_numbers(request: TrialRequest) -> dict[str, int | float]:
    return {"density": request.keys(TopKKeys).compression_density or DEFAULT_DENSITY}


# In the order of lists.
COMPRESSIONS = (
    Compression(
        name="bf16",
        summary="gradients as bfloat16",
        implementation="paceline.train.transports.compression.codecs:bf16",
    ),
    Compression(
        name="fp16",
        summary="gradients as float16",
        implementation="paceline.train.transports.compression.codecs:fp16",
    ),
    Compression(
        name="powersgd",
        summary="low-rank factors of every matrix",
        implementation="paceline.train.transports.compression.codecs:PowerSgd",
        Keys=PowerSgdKeys,
        numbers=_powersgd_numbers,
    ),
    Compression(
        name="topk",
        summary="the elements with the largest magnitudes",
        implementation="paceline.train.transports.compression.codecs:TopK",
        Keys=TopKKeys,
        numbers=_topk_numbers,
    ),
    Compression(
        name="terngrad",
        summary="ternary gradients, 2 bits an element",
        implementation="paceline.train.transports.compression.codecs:TernGrad",
    ),
    Compression(
        name="int8",
        summary="blocks of 8-bit integers with a scale each",
        implementation="paceline.train.transports.compression.codecs:int8",
    ),
)
