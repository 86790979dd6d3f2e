"""Descriptors of the methods of gradient compression."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from paceline.spec.descriptors import CompressionDescriptor, KeyModel
from paceline.spec.models import TrialRequest
from paceline.spec.values import PositiveInt

DEFAULT_POWERSGD_RANK = 4  # as Vogels et al. (PowerSGD, NeurIPS 2019) use for language models
DEFAULT_DENSITY = 0.01  # Lin et al. (Deep Gradient Compression, ICLR 2018) send 0.1 to 1 %


class Bf16(CompressionDescriptor):
    name = "bf16"
    summary = "gradients as bfloat16"
    position = 10
    implementation = "paceline.transports.compression.codecs:bf16"


class Fp16(CompressionDescriptor):
    name = "fp16"
    summary = "gradients as float16"
    position = 20
    implementation = "paceline.transports.compression.codecs:fp16"


class PowerSgdKeys(KeyModel):
    """Keys of `powersgd`."""

    compression_rank: PositiveInt | None = None  # of the approximation


class PowerSgd(CompressionDescriptor):
    name = "powersgd"
    summary = "low-rank factors of every matrix"
    position = 30
    implementation = "paceline.transports.compression.powersgd:PowerSgd"
    Keys = PowerSgdKeys

    def numbers(self, request: TrialRequest) -> dict[str, int | float]:
        return {"rank": request.keys(PowerSgdKeys).compression_rank or DEFAULT_POWERSGD_RANK}


class TopKKeys(KeyModel):
    """Keys of `topk`."""

    # part of the elements that is sent
    compression_density: Annotated[float, Field(gt=0, le=1, strict=False)] | None = None


class TopK(CompressionDescriptor):
    name = "topk"
    summary = "the elements with the largest magnitudes"
    position = 40
    implementation = "paceline.transports.compression.topk:TopK"
    Keys = TopKKeys

    def numbers(self, request: TrialRequest) -> dict[str, int | float]:
        return {"density": request.keys(TopKKeys).compression_density or DEFAULT_DENSITY}


class TernGrad(CompressionDescriptor):
    name = "terngrad"
    summary = "ternary gradients, 2 bits an element"
    position = 50
    implementation = "paceline.transports.compression.terngrad:TernGrad"


class Int8(CompressionDescriptor):
    name = "int8"
    summary = "blocks of 8-bit integers with a scale each"
    position = 60
    implementation = "paceline.transports.compression.codecs:int8"
