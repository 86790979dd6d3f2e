"""Descriptor of `spark-allgather`: all-reduce over the allGather of Spark's barrier tasks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.spec.descriptors import TransportDescriptor
from paceline.transports.gradients import (
    GradientKeys,
    GradientOptions,
    gradient_key_faults,
    gradient_options,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline.spec.models import TrialRequest


class SparkAllgather(TransportDescriptor):
    """BarrierTaskContext.allGather."""

    name = "spark-allgather"
    summary = "allGather between the tasks of a Spark barrier stage"
    position = 60
    implementation = "paceline.transports.spark_allgather.transport:SparkAllGatherTransport"
    Keys = GradientKeys
    Options = GradientOptions
    needs = "spark"
    joins_flat_only = True
    sends_gradients = True
    has_all_to_all = False

    def key_faults(self, request: TrialRequest) -> Iterator[str]:
        yield from gradient_key_faults(request)

    def options(self, request: TrialRequest) -> GradientOptions:
        return gradient_options(request)
