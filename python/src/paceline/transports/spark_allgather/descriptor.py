"""Descriptor of `spark-allgather`: all-reduce over the allGather of Spark's barrier tasks."""

from __future__ import annotations

from paceline.transports.gradients import GradientTransport


class SparkAllgather(GradientTransport):
    """BarrierTaskContext.allGather."""

    name = "spark-allgather"
    summary = "allGather between the tasks of a Spark barrier stage"
    position = 60
    implementation = "paceline.transports.spark_allgather.transport:SparkAllGatherTransport"
    needs = "spark"
    joins_flat_only = True
    has_all_to_all = False
