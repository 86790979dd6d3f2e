"""Candidates of each round for a given trial."""

from __future__ import annotations

import pytest
from tests.support.trials import changed
from tests.unit.runner.tune.comm.conftest import entry, parsed
from tests.unit.runner.tune.conftest import local_context

from paceline.plan.trials.planning import plan_trials
from paceline.runner.tune.comm import COMM_SEARCH, communication_of, why_left_alone
from paceline.runner.tune.session import Searched
from paceline.runner.tune.spaces import SearchTarget

MANY = {"nodes": 2}


def tried(name, *keys, values=None, tune="", trial_values=None, **where):
    """Return what a round tries for one trial with `values`, as tuples of these keys."""
    experiment = parsed(entry(**{**(values or {}), **where}), tune=tune)
    request = experiment.trials[1]
    trial = planned(experiment)
    trial = changed(trial, **(trial_values or {}))
    searched = Searched(
        target=SearchTarget(workload="simple-big", name="trials[2]"), request=request
    )
    found = COMM_SEARCH.rounds[name](searched, trial, local_context(experiment, 4))
    return [tuple(getattr(r, key, None) for key in keys) for r in found]


def planned(experiment):
    trials = plan_trials(experiment, {"simple-big": "data"}, 4)
    return next(t for t in trials if not t.is_baseline)


def test_buckets_are_tried_by_size_and_by_number_in_flight():
    found = tried("buckets", "bucket_mb", "buckets_in_flight")
    sizes = (1.0, 5.0, 25.0, 50.0, 100.0)
    assert found == [
        *(
            (size, count)
            for size in sizes
            for count in (1, 2, 4, None)
            if (size, count) != (100, 4)
        ),
        (234.0, None),  # AlexNet, 61 million parameters, is one bucket
    ]


def test_spec_may_say_which_buckets_are_tried():
    tune = 'buckets_mb = [10, "model"]\nbuckets_in_flight = [3, "unbounded"]'
    found = tried("buckets", "bucket_mb", "buckets_in_flight", tune=tune)
    assert found == [(10.0, 3), (10.0, None), (234.0, None)]


def test_key_that_the_trial_says_itself_is_kept():
    found = tried("buckets", "bucket_mb", "buckets_in_flight", values={"bucket_mb": 40})
    assert found == [(40.0, count) for count in (1, 2, 4, None)]
    assert tried("algorithm", "algorithm", values={"algorithm": '"ring"'}) == []
    assert tried("parameters", "mpi_parameters", values={"mpi_parameters": '{a = "1"}'}) == []
    tune = 'compressions = ["bf16"]'
    assert tried("compression", "compression", tune=tune, values={"compression": '"topk"'}) == []


def test_waits_are_tried_with_each_largest_message():
    found = tried("waits", "bucket_mb", "bucket_wait_ms", "buckets_in_flight")
    sizes = (1.0, 5.0, 25.0, 50.0, 100.0, 234.0)
    assert found == [(size, wait, None) for size in sizes for wait in (1.0, 5.0)]
    tune = 'buckets_mb = [64, "model", 500]\nbucket_waits_ms = [3.5]'
    found = tried("waits", "bucket_mb", "bucket_wait_ms", tune=tune)
    assert found == [(64.0, 3.5), (234.0, 3.5)]
    reached = {"buckets_in_flight": 2, "bucket_mb": 5.0}
    tune = "buckets_mb = []\nbucket_waits_ms = [2]"
    found = tried(
        "waits", "bucket_mb", "bucket_wait_ms", "buckets_in_flight", tune=tune, trial_values=reached
    )
    assert found == [(5.0, 2.0, None)]


@pytest.mark.parametrize(
    "values",
    [{"buckets_in_flight": 2}, {"bucket_wait_ms": 1}, {"compression": '"bf16"'}, MANY],
)
def test_no_waits_are_tried_beside_keys_that_exclude_them(values):
    assert tried("waits", "bucket_wait_ms", values=values) == []
    assert tried("buckets", "buckets_in_flight", values={"bucket_wait_ms": 1}) == [(None,)] * 6


def test_compression_is_tried_without_the_wait_that_was_reached():
    tune = 'compressions = ["bf16"]'
    reached = {"bucket_wait_ms": 5.0}
    keys = ("compression", "bucket_wait_ms")
    assert tried("compression", *keys, tune=tune, trial_values=reached) == [("bf16", None)]
    assert tried("compression", *keys, tune=tune, values={"bucket_wait_ms": 5}) == []


def test_empty_list_leaves_its_choice_out():
    assert tried("waits", "bucket_wait_ms", tune="bucket_waits_ms = []") == []
    assert tried("buckets", "bucket_mb", tune="buckets_mb = []\nbuckets_in_flight = [2]") == [
        (25.0,)
    ]
    assert tried("algorithm", "algorithm", tune="algorithms = []") == []


def test_hierarchical_is_tried_only_where_nodes_have_several_ranks_that_reduce_together():
    everywhere = ["auto", "native", "ring", "recursive-doubling", "rabenseifner"]
    levels = [*everywhere, "hierarchical"]
    flat = {**MANY, "reduction": '"flat"'}
    zero = {**MANY, "reduction": '"zero-1"'}
    assert [name for (name,) in tried("algorithm", "algorithm")] == everywhere
    assert [name for (name,) in tried("algorithm", "algorithm", values=flat)] == levels
    assert [name for (name,) in tried("algorithm", "algorithm", values=MANY)] == everywhere
    assert [name for (name,) in tried("algorithm", "algorithm", values=zero)] == everywhere


def test_only_transport_mpi_has_algorithms_and_only_mpirun_parameters():
    assert tried("algorithm", "algorithm", launcher="spark", transport="mpi") != []
    assert tried("algorithm", "algorithm", transport="gloo") == []
    assert tried("parameters", "mpi_parameters", launcher="spark", transport="mpi", **MANY) == []
    assert tried("parameters", "mpi_parameters", transport="gloo", **MANY) == []


def test_compression_is_tried_only_where_the_spec_allows_it():
    assert tried("compression", "compression") == []
    allowed = tried("compression", "compression", tune='compressions = ["bf16", "topk"]')
    assert allowed == [("bf16",), ("topk",)]


def test_parameters_are_those_of_what_carries_the_messages():
    def names(values=None, **changes):
        found = tried("parameters", "mpi_parameters", values=values, trial_values=changes)
        return {name for (parameters,) in found for name in parameters}

    # one host, and the algorithm left to us: memory is shared, no message is sent
    assert names() == set()
    assert "smsc" in names(algorithm="ring")
    assert not any(name.startswith("coll") for name in names(algorithm="ring"))
    assert "coll_tuned_allreduce_algorithm" in names(algorithm="native")
    between = names(MANY)
    assert {"btl_tcp_sndbuf", "btl_tcp_rdma_pipeline_frag_size"} <= between
    assert not any(name.startswith("btl_sm") for name in between)


def test_later_round_keeps_what_earlier_ones_have_found():
    reached = {"bucket_mb": 5.0, "buckets_in_flight": 2}
    found = tried("algorithm", "bucket_mb", "buckets_in_flight", "algorithm", trial_values=reached)
    assert found[2] == (5.0, 2, "ring")


def test_communication_is_said_only_where_it_is_not_the_default():
    trial = planned(parsed(entry()))
    assert {k: v for k, v in communication_of(trial).items() if v is not None} == {}
    other = changed(trial, algorithm="native", parameters={"a": "1"})
    assert {k: v for k, v in communication_of(other).items() if v is not None} == {
        "algorithm": "native",
        "mpi_parameters": {"a": "1"},
    }


@pytest.mark.parametrize(
    ("where", "reason"),
    [
        ({"transport": "shared"}, "memory"),
        ({"transport": None}, "memory"),
        ({"transport": None, "local_strategy": '"pipeline"'}, "memory"),
        ({"launcher": "spark", "transport": "spark-rounds"}, "spark-rounds leaves nothing"),
        (
            {"transport": None, "local_strategy": '"intraop"', "ranks_per_node": 1},
            "one rank, nothing is sent",
        ),
    ],
)
def test_trial_that_sends_nothing_is_left_alone_with_the_reason(where, reason):
    assert reason in why_left_alone(parsed(entry(**where)).trials[1])


def test_trial_that_sends_is_searched():
    assert why_left_alone(parsed(entry(transport="gloo")).trials[1]) is None
    assert why_left_alone(parsed(entry(transport=None, **MANY)).trials[1]) is None
