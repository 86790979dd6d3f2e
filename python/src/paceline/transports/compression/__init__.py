"""Less to send: how the gradients of one bucket are summed over ranks, compressed or not."""

from __future__ import annotations

from paceline.transports.compression.base import Bucket, GradientSum
from paceline.transports.compression.create import create_sum
from paceline.transports.compression.flat_bucket import FlatBucket, pack

__all__ = ["Bucket", "FlatBucket", "GradientSum", "create_sum", "pack"]
