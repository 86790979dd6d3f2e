"""The sum of gradients that a trial asks for."""

from __future__ import annotations

import torch.distributed as dist

from paceline.plan.trial import Trial
from paceline.spec.extensions import COMPRESSIONS, load_object
from paceline.transports.bucket_settings import CompressionSettings, gradient_options_of
from paceline.transports.compression.bucket import Compressor, GradientSum
from paceline.transports.compression.sums import CompressedSum, InFlight, PlainSum


def create_sum(trial: Trial, group: dist.ProcessGroup | None = None) -> GradientSum:
    """Return the sum over the ranks of `group`, or over all; the process group must be open."""
    options = gradient_options_of(trial)
    found: GradientSum
    if options.compression is None:
        found = PlainSum(group)
    else:
        compressor = create_compressor(options.compression, trial.training.seed, group)
        found = CompressedSum(
            compressor,
            ranks=dist.get_world_size(group),
            rank=dist.get_rank(),
            limit_s=trial.limits.collective_s,
        )
    if options.buckets_in_flight is not None:
        found = InFlight(found, options.buckets_in_flight)
    return found


def create_compressor(
    settings: CompressionSettings, seed: int, group: dist.ProcessGroup | None = None
) -> Compressor:
    """Return the method's compressor. seed: for what is drawn at random."""
    create = load_object(COMPRESSIONS.get(settings.method).implementation)
    compressor: Compressor = create(settings.numbers, seed, group)
    return compressor
