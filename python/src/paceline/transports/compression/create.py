"""Create the gradient sum of a trial."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist

from paceline.transports.compression.codec_compressor import CodecCompressor
from paceline.transports.compression.codecs import Blockwise, Half
from paceline.transports.compression.compressed import CompressedSum
from paceline.transports.compression.plain import InFlight, PlainSum
from paceline.transports.compression.powersgd import PowerSgd
from paceline.transports.compression.terngrad import TernGrad
from paceline.transports.compression.topk import TopK

if TYPE_CHECKING:
    from paceline.plan.trial import CompressionSettings, Trial
    from paceline.transports.compression.base import Compressor, GradientSum


def create_sum(trial: Trial, group: dist.ProcessGroup | None = None) -> GradientSum:
    """Return the gradient sum over `group`, or over all ranks; the process group must be open."""
    found: GradientSum
    if trial.compression is None:
        found = PlainSum(group)
    else:
        compressor = create_compressor(
            trial.compression,
            trial.training.seed,
            group,
            all_to_all=trial.transport != "spark-allgather",
        )
        found = CompressedSum(
            compressor,
            ranks=dist.get_world_size(group),
            rank=dist.get_rank(),
            limit_s=trial.limits.collective_s,
        )
    if trial.buckets_in_flight is not None:
        found = InFlight(found, trial.buckets_in_flight)
    return found


def create_compressor(
    settings: CompressionSettings,
    seed: int,
    group: dist.ProcessGroup | None = None,
    *,
    all_to_all: bool = True,
) -> Compressor:
    """Return a compressor. seed: seed of random draws. all_to_all: whether the group supports
    all-to-all."""
    match settings.method:
        case "bf16" | "fp16":
            return CodecCompressor(Half(settings.method), group, all_to_all=all_to_all)
        case "int8":
            return CodecCompressor(Blockwise(), group, all_to_all=all_to_all)
        case "powersgd":
            assert settings.rank is not None, "planning sets it"
            return PowerSgd(settings.rank, seed, group)
        case "topk":
            assert settings.density is not None, "planning sets it"
            return TopK(settings.density, group)
        case "terngrad":
            return TernGrad(seed, group=group)
