"""Descriptor of `spark-rounds`: one Spark job per round, which averages weights."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.plan.spec.descriptors import TransportDescriptor
from paceline.plan.spec.models import TrialRequest
from paceline.train.strategies.descriptors import ProcessesKeys


class SparkRounds(TransportDescriptor):
    """Broadcast, train, collect and average."""

    name = "spark-rounds"
    summary = "rounds of Spark jobs that average weights"
    position = 70
    needs = "spark"
    joins_flat_only = True
    opens_process_group = False
    averages_weights = True

    def key_faults(self, request: TrialRequest) -> Iterator[str]:
        if request.keys(ProcessesKeys).averaging_start_step:
            yield (
                "averaging_start_step: rounds of Spark jobs average weights from the first one on; "
                "remove it"
            )
