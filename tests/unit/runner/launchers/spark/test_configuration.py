from __future__ import annotations

import pytest
from tests.support.trials import tiny_trial

from paceline.plan.spec.models import Limits
from paceline.runner.launchers.spark.configuration import (
    driver_memory,
    job_defaults,
    liveness_settings,
    native_settings,
)


def trial(transport, *, workload="simple-big", ranks=2, collective_s=120.0, memory="1g"):
    return tiny_trial(
        {"ranks_per_node": ranks},
        {"workload": workload, "model": "any"},
        launcher="spark",
        transport=transport,
        local_strategy="processes",
        limits=Limits(rendezvous_s=30, collective_s=collective_s),
        launcher_options={"driver_memory": memory},
    )


@pytest.mark.parametrize("transport", ["gloo", "mpi"])
def test_other_transports_are_left_alone(transport):
    assert native_settings(trial(transport)) == {}
    assert driver_memory(trial(transport)) == "1g"


def test_job_script_asks_for_memory_beside_the_heap_on_a_cluster_alone():
    memory = "spark.executor.memoryOverhead"
    assert int(job_defaults(trial("gloo"), local=False)[memory].removesuffix("m")) > 2 * 1024
    assert memory not in job_defaults(trial("gloo"), local=True)


@pytest.mark.parametrize("collective_s", [1.0, 2.5, 20.0, 120.0, 600.0])
def test_lost_executor_is_noticed_within_the_limit_of_an_exchange(collective_s):
    settings = native_settings(trial("spark-rounds", collective_s=collective_s))
    timeout_s = int(settings["spark.network.timeout"].removesuffix("s"))
    beat_s = int(settings["spark.executor.heartbeatInterval"].removesuffix("s"))
    # Spark refuses a beat that is not shorter than the timeout
    assert beat_s < timeout_s <= max(collective_s + 1, 2)


def test_heap_holds_what_all_ranks_send_unless_the_spec_says_otherwise():
    """1024 MiB and, for each rank, four copies of weights and momentum, 4 bytes each."""
    assert driver_memory(trial("spark-rounds")) == "4754m"
    assert driver_memory(trial("spark-rounds", ranks=4)) == "8483m"
    assert driver_memory(trial("spark-rounds", workload="tiny")) == "1030m"
    assert driver_memory(trial("spark-rounds", memory="3g")) == "3g"


@pytest.mark.parametrize("transport", ["gloo", "mpi"])
@pytest.mark.parametrize("collective_s", [1.0, 20.0, 120.0])
def test_ranks_that_miss_a_peer_speak_before_spark_gives_its_executor_up(transport, collective_s):
    settings = liveness_settings(trial(transport, collective_s=collective_s))
    timeout_s = int(settings["spark.network.timeout"].removesuffix("s"))
    beat_s = int(settings["spark.executor.heartbeatInterval"].removesuffix("s"))
    assert timeout_s == 2 * collective_s
    # and an executor that misses its driver ends at about the same time
    assert beat_s * int(settings["spark.executor.heartbeat.maxFailures"]) >= timeout_s
