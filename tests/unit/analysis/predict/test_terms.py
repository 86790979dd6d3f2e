"""Each term of a prediction, against values computed by hand."""

from __future__ import annotations

import dataclasses
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from tests.support.trials import changed, tiny_trial
from tests.unit.analysis import fabricate
from tests.unit.analysis import operations as made
from tests.unit.analysis.fabricate import make_one
from tests.unit.analysis.ways import MPI

from paceline.analysis.predict.exchange import (
    GATHERS,
    ExchangeProfile,
    NodeLink,
    NodeOperation,
    Replay,
    declared_profile,
    given_link,
    measured_links,
    recorded_profile,
    slower_of,
)
from paceline.analysis.predict.node import (
    NodeSetup,
    Spread,
    node_step,
    reduction_between_nodes,
    slowest_ratio,
)
from paceline.analysis.predict.prediction import PredictionRequest
from paceline.analysis.trial.reading import load_trial
from paceline.analysis.trial.steps import read_steps
from paceline.plan.costs import all_reduce
from paceline.plan.spec.extensions import STRATEGIES
from paceline.plan.spec.reduction import StepReduction
from paceline.train.strategies.descriptors import ProcessesOptions

ONE = np.ones((1, 1))
LINKS = np.ones((2, 1, 1))  # beside the computation, and after it


def message(payload: float, lead: float, operation: str = "allreduce") -> NodeOperation:
    return NodeOperation(operation=operation, payload_bytes=payload, lead=lead, samples=8.0)


def replayed(
    profile: ExchangeProfile, own_s: float, nodes: int = 2, samples: float = 8.0
) -> Replay:
    """1 MB/s and no latency: on two nodes a ring takes a second for each MB."""
    setup = np.array([nodes]), np.array([samples])
    return Replay(profile, ("ring",), *setup, own_s * ONE, 0 * LINKS, 1e6 * LINKS)


def exposed(profile: ExchangeProfile, own_s: float, nodes: int = 2, samples: float = 8.0) -> float:
    return float(replayed(profile, own_s, nodes, samples).exposed_s()[0, 0])


def test_the_slowest_of_uniform_times_is_n_over_n_plus_1() -> None:
    times = np.linspace(0, 2, 4001)  # uniform with mean 1: the largest of n has mean 2n / (n + 1)
    nodes = np.array([1, 2, 4, 64, 1024])
    expected = [1, 4 / 3, 8 / 5, 128 / 65, 2048 / 1025]
    assert slowest_ratio(times, nodes) == pytest.approx(expected, rel=0.02)


def test_the_slowest_of_a_few_times_is_that_of_all_combinations() -> None:
    times, nodes = np.array([3.0, 1.0, 2.0]), np.array([1, 2, 4])
    largest = [np.mean([max(drawn) for drawn in product(times, repeat=n)]) for n in nodes]
    assert slowest_ratio(times, nodes) == pytest.approx(np.array(largest) / 2)


def test_equal_times_have_no_slowest_node() -> None:
    assert slowest_ratio(np.full(40, 0.3), np.array([1, 8])) == pytest.approx(1.0)


@pytest.mark.parametrize(("together", "waiting"), [(False, 1 / 3), (True, 0.0)])
def test_nodes_that_are_slow_at_the_same_time_do_not_wait(
    tmp_path: Path, together: bool, waiting: float
) -> None:
    step = node_step(load_trial(make_one(tmp_path, MPI, nodes=2, ranks=1)))
    assert step is not None
    first, other = np.random.default_rng(1).uniform(0, 2, (2, 4000))
    times = np.stack([first, first if together else other])
    step = dataclasses.replace(step, times=times)
    setup = NodeSetup([step], Spread([step]), PredictionRequest(nodes=(2,)), 8)
    assert setup.slowest(np.array([1, 2])) == pytest.approx([1, 1 + waiting], abs=0.02)


def test_what_ends_after_the_last_gradient_is_exposed() -> None:
    # 0.2 s at -0.5 s, then 0.4 s at -0.2 s: ends 0.2 s after the last gradient
    profile = ExchangeProfile(messages=(message(2e5, 0.5), message(4e5, 0.2)))
    assert exposed(profile, own_s=1.0) == pytest.approx(0.2)


def test_a_message_waits_for_the_one_before_it() -> None:
    # 0.6 s at -0.5 s ends at 0.1 s; the next begins there and ends at 0.5 s
    profile = ExchangeProfile(messages=(message(6e5, 0.5), message(4e5, 0.2)))
    assert exposed(profile, own_s=1.0) == pytest.approx(0.5)


def test_gradients_are_ready_earlier_in_a_longer_step() -> None:
    profile = ExchangeProfile(messages=(message(5e5, 0.25),))
    assert exposed(profile, own_s=1.0) == pytest.approx(0.25)
    assert exposed(profile, own_s=2.0) == pytest.approx(0.0)


def test_a_strategy_that_sums_after_its_passes_exposes_all_of_them() -> None:
    profile = ExchangeProfile(messages=(message(2e5, 0.5), message(1e5, 0.5, "allgather")))
    assert exposed(profile, own_s=1.0) == 0
    # the sum of 0.2 s is requested with the last gradient, the factors still before it
    assert exposed(profile.without_overlap(), own_s=1.0) == pytest.approx(0.3)


def test_how_a_strategy_reduces_is_what_it_sends() -> None:
    reduction = StepReduction(among="ranks", in_buckets=True)
    replay = replayed(declared_profile(reduction, parameters=50_000, lead=0.1), own_s=1.0)
    assert float(replay.exposed_s()[0, 0]) == pytest.approx(0.1)  # 200 kB in 0.2 s
    # two ranks of each node: a ring of four has 1.5 payloads on its busiest link
    all_ranks = dataclasses.replace(replay, ranks_per_node=2)
    assert float(all_ranks.exposed_s()[0, 0]) == pytest.approx(0.2)


def test_gathered_factors_grow_with_samples_and_nodes() -> None:
    profile = ExchangeProfile(messages=(message(1e5, 0.0, "allgather"),))
    assert exposed(profile, own_s=1.0) == pytest.approx(0.1)  # to one other rank
    assert exposed(profile, own_s=1.0, samples=16.0) == pytest.approx(0.2)
    assert exposed(profile, own_s=1.0, nodes=4) == pytest.approx(0.3)


def test_products_after_the_last_gradient_hide_sums() -> None:
    # 0.6 s at -0.2 s ends at 0.4 s; products and their update take 0.3 s
    profile = ExchangeProfile(
        messages=(message(6e5, 0.2),), products_s=0.2, after_s=0.3, global_samples=16.0
    )
    assert exposed(profile, own_s=1.0) == pytest.approx(0.1)
    assert exposed(profile, own_s=1.0, samples=4.0) == pytest.approx(0.1)  # not faster
    assert exposed(profile, own_s=1.0, samples=12.0) == 0  # products of 24 samples: 0.3 s


def test_a_replay_tells_when_messages_move_beside_the_nodes_own_work() -> None:
    # the first moves from -0.5 s to -0.2 s; the second from 0 to 0.4 s, 0.1 s beside products
    profile = ExchangeProfile(
        messages=(message(3e5, 0.5), message(4e5, 0.0)), products_s=0.1, after_s=0.1
    )
    active_s, moved_bytes = replayed(profile, own_s=1.0).beside_own()
    assert active_s == pytest.approx(0.4 * ONE)
    assert moved_bytes == pytest.approx(4e5 * ONE)
    assert replayed(profile, own_s=1.0, nodes=1).beside_own()[0] == 0


def test_one_node_sends_nothing() -> None:
    assert exposed(ExchangeProfile(messages=(message(1e6, 0.0),)), 1.0, nodes=1) == 0


def test_a_given_link_has_the_overhead_of_tcp() -> None:
    assert given_link(1e9).bytes_per_s[1] == pytest.approx(125e6 * 1448 / 1538)
    assert given_link(1e9, 1e-4).latency_s == (1e-4, 1e-4)


def test_a_slow_host_limits_a_fast_link() -> None:
    fast = NodeLink(latency_s=(1e-5, 1e-5), bytes_per_s=(1e9, 1e9), source="given")
    host = NodeLink(latency_s=(1e-5, 1e-5), bytes_per_s=(2e8, 3e8), source="measured")
    both = slower_of(fast, host)
    assert both.bytes_per_s == (2e8, 3e8)


def test_bandwidth_is_found_in_recorded_operations(tmp_path):
    files = fabricate.make_one(tmp_path, case=fabricate.Case(steps=20), transfer_s=0.056)
    links = measured_links([made.two_buckets(files)], ("ring",))
    # a ring of two sends each byte once in two rounds: 2 MB take 20 ms and 20 MB 56 ms, so a byte
    # takes 2 ns and a round 8 ms
    for link in links:
        assert link.bytes_per_s[0] == pytest.approx(5e8, rel=0.01)
        assert list(link.latency_s) == pytest.approx([4e-3, 16e-3], rel=0.01)


def test_the_recorded_profile_has_both_buckets(tmp_path):
    record = made.two_buckets(fabricate.make_one(tmp_path, case=fabricate.Case(steps=20)))
    profile = recorded_profile(record, read_steps(record), 0.5, 8.0, gradient_bytes=22e6)
    assert [m.payload_bytes for m in profile.messages] == [made.FIRST_BYTES, made.SECOND_BYTES]
    leads = [m.lead for m in profile.messages]
    assert leads == pytest.approx([made.EARLY_S / 0.5, 0.0], abs=1e-6)


def test_scattered_gradients_and_gathered_weights_are_one_all_reduce(tmp_path):
    way = dataclasses.replace(MPI, reduction="zero-1")
    files = fabricate.make_one(tmp_path, way, case=fabricate.Case(steps=20))

    def both(rank, step, own_s):
        number, begun_s = 2 * step.step, own_s + 0.001
        moves = {"operation": "alltoall", "awaited": True, "payload_bytes": made.SECOND_BYTES}
        yield made.row(rank, number, begun_s, begun_s + 0.01, **moves)
        yield made.row(rank, number + 1, begun_s + 0.02, begun_s + 0.03, **moves)

    record = made.in_each_step(files, both)
    profile = recorded_profile(record, read_steps(record), 0.5, 8.0, gradient_bytes=20e6)
    (found,) = profile.messages
    assert (found.operation, found.payload_bytes) == ("allreduce", made.SECOND_BYTES)
    assert profile.unknown == ()


def test_operations_that_a_layer_awaits_are_no_part_of_the_profile(tmp_path):
    def rows(rank, step, own_s):
        yield made.row(rank, step.step, own_s - 0.02, own_s - 0.01, awaited=True)

    record = made.in_each_step(fabricate.make_one(tmp_path, case=fabricate.Case(steps=20)), rows)
    assert recorded_profile(record, read_steps(record), 0.5, 8.0, gradient_bytes=22e6) is None


def test_products_are_found_beside_the_communication_of_layers(tmp_path):
    files = fabricate.make_one(tmp_path, case=fabricate.Case(steps=20), pass_comm_s=0.05)
    record = made.two_buckets(files, operation=GATHERS)
    steps = read_steps(record)
    longer = {**steps.fields, "backward_s": steps["backward_s"] + 0.03}  # after the last gradient
    profile = recorded_profile(record, dataclasses.replace(steps, fields=longer), 0.5, 8.0, 22e6)
    assert profile.products_s == pytest.approx(0.03, abs=1e-5)


def test_a_nodes_own_step_has_no_communication(tmp_path) -> None:
    way = dataclasses.replace(MPI, nodes=2, ranks=1)
    step = node_step(load_trial(fabricate.make_one(tmp_path, way, case=fabricate.Case(steps=20))))
    # the first node is lead_s faster than the other
    assert step.mean_s == pytest.approx(way.step_s - way.transfer_s - way.lead_s / 2)
    assert step.samples == 4  # of a global batch of 8


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_sharded_moves_the_parameters_twice_and_the_gradients_once(ranks: int) -> None:
    reduction = STRATEGIES.get("sharded").reduction("gloo", None)
    profile = declared_profile(reduction, parameters=1000, lead=0.0)
    each = 4 * 1000 * (ranks - 1) / ranks  # bytes of one all-gather, or of a reduce-scatter
    assert all_reduce("ring", ranks).path * profile.reduced_bytes == pytest.approx(3 * each)


def test_ranks_that_send_messages_on_one_node_are_predicted_to_sum_in_its_memory() -> None:
    alone = changed(tiny_trial({"ranks_per_node": 2, "replicas_per_node": 2}),
                    local_strategy="processes", transport="gloo")  # fmt: skip
    assert alone.reduction.in_buckets
    assert reduction_between_nodes(alone).among == "nodes"
    two = alone.model_copy(update={"placement": alone.placement.model_copy(update={"nodes": 2})})
    flat = changed(two, reduction="flat")
    assert reduction_between_nodes(flat) == flat.reduction == alone.reduction


@pytest.mark.parametrize("nodes", [2, 5])
def test_zero_moves_the_gradients_once_and_the_weights_once(nodes: int) -> None:
    options = ProcessesOptions(reduction="zero-1")
    reduction = STRATEGIES.get("processes").reduction("gloo", options)
    profile = declared_profile(reduction, parameters=1000, lead=0.0)
    each = 4 * 1000 * (nodes - 1) / nodes  # bytes of the reduce-scatter, or of the all-gather
    assert reduction.among == "nodes"
    assert all_reduce("ring", nodes).path * profile.reduced_bytes == pytest.approx(2 * each)
