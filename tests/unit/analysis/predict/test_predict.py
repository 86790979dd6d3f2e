"""Predictions of a fabricated machine whose every term is known."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
from tests.unit.analysis import fabricate
from tests.unit.analysis import operations as made
from tests.unit.analysis.ways import INTRAOP, MPI_GLOO, PIPELINE, PROCESSES, SEQUENTIAL

from paceline.analysis.compare.run import compare_run
from paceline.analysis.predict.exchange import GATHERS, given_link
from paceline.analysis.predict.predict import MODEL_ERROR, predict, unmeasured_shares
from paceline.analysis.predict.prediction import PredictionRequest
from paceline.analysis.trial.reading import TrialRecord, load_run

FAST = given_link(1e12, 1e-9)
SEQUENTIAL_NAME = "tiny.local.none.sequential.n1r1t1.fp32"


@pytest.fixture
def records(tmp_path: Path) -> Any:
    def make(
        *ways: Any,
        batch: int = 8,
        steps: int = 20,
        jitter: float = 0.0,
        repeats: int = 2,
    ) -> list[TrialRecord]:
        case = fabricate.Case(steps=steps, warmup_steps=2, global_batch=batch, samples=64)
        root = tmp_path / str(len(list(tmp_path.iterdir())))
        options = {"cases": [case], "jitter": jitter, "repeats": repeats}
        return load_run(fabricate.make_run(root, list(ways), **options))

    return make


def test_half_the_batch_on_two_nodes_takes_its_measured_time(records) -> None:
    quick = dataclasses.replace(SEQUENTIAL, forward_s=0.1, backward_s=0.2)
    runs = [*records(SEQUENTIAL, batch=8), *records(quick, batch=4)]
    request = PredictionRequest(nodes=(1, 2), link=FAST, transports=("gloo",))
    one, two = predict(runs, request).predictions
    assert one.step_s.estimate == pytest.approx(SEQUENTIAL.step_s, rel=0.02)
    # equal steps: no slowest node; gradients of 41 parameters over a fast link take no time
    assert two.step_s.estimate == pytest.approx(quick.step_s, rel=0.02)
    assert two.samples_per_s.estimate == pytest.approx(8 / quick.step_s, rel=0.02)
    # equal repeats: the width is the error of the model
    width = math.log(two.step_s.high / two.step_s.low) / 2
    assert width == pytest.approx(1.645 * MODEL_ERROR, rel=0.2)
    assert (one.transport, two.transport) == (None, "gloo")
    assert (one.speedup.low, one.speedup.high) == (1, 1)
    assert two.speedup.estimate == pytest.approx(SEQUENTIAL.step_s / quick.step_s, rel=0.02)


def test_the_exchange_lengthens_the_own_step_among_several_nodes_only(records, tmp_path) -> None:
    quick = dataclasses.replace(SEQUENTIAL, forward_s=0.1, backward_s=0.2)
    alone = [
        *records(SEQUENTIAL, INTRAOP, batch=8),
        *records(quick, dataclasses.replace(INTRAOP, forward_s=0.05, backward_s=0.1), batch=4),
    ]
    way = dataclasses.replace(
        quick,
        launcher="mpi",
        transport="gloo",
        nodes=2,
        backward_s=0.25,
        transfer_s=0.056,
    )
    files = fabricate.make_one(tmp_path / "two", way, case=fabricate.Case(steps=20))
    found = predict([*alone, made.two_buckets(files)], PredictionRequest(nodes=(1, 2))).predictions
    seconds = {(each.setup.split()[0], each.nodes): each.node_s for each in found}
    assert seconds["sequential", 1] == pytest.approx(SEQUENTIAL.step_s, rel=0.01)
    assert seconds["sequential", 2] == pytest.approx(quick.step_s + 0.05, rel=0.01)
    # intraop was measured on one node only: the addition is that of the other strategy
    added_s = 0.05 / quick.step_s * (INTRAOP.step_s - 0.18)
    assert seconds["intraop", 2] == pytest.approx(INTRAOP.step_s - 0.18 + added_s, rel=0.02)


@pytest.mark.parametrize("operation", ["allreduce", GATHERS])
def test_a_pipeline_needs_a_trial_on_two_nodes_where_factors_are_sent(
    records, tmp_path, operation
) -> None:
    pipeline = dataclasses.replace(PIPELINE, stages=2, micro_batches=4)
    way = dataclasses.replace(SEQUENTIAL, launcher="mpi", transport="gloo", nodes=2)
    files = fabricate.make_one(tmp_path / "two", way, case=fabricate.Case(steps=20))
    two_nodes = made.two_buckets(files, operation=operation)
    request = PredictionRequest(nodes=(2,), scaling="weak", strategies=("pipeline",))
    found = predict([*records(pipeline), two_nodes], request)
    if operation == GATHERS:
        assert found.predictions == ()
        assert "linear layers of its stages send factors" in found.refusals[0].reason
    else:
        assert len(found.predictions) == 1


def test_a_share_that_was_not_measured_has_bounds_and_says_what_to_measure(
    records,
) -> None:
    found = predict(
        records(SEQUENTIAL),
        PredictionRequest(nodes=(1, 2, 4), link=FAST, transports=("gloo",)),
    )
    one, two, four = found.predictions
    assert [each.is_bounded for each in (one, two, four)] == [False, True, True]
    # from as long as with the whole batch to proportional to it
    assert two.step_s.low == pytest.approx(SEQUENTIAL.step_s * 0.525, rel=0.1)
    assert two.step_s.high == pytest.approx(SEQUENTIAL.step_s * 0.975, rel=0.1)
    assert four.step_s.low == pytest.approx(SEQUENTIAL.step_s * 0.29, rel=0.1)
    assert [each.global_batch for each in found.unmeasured] == [2, 4]
    assert found.unmeasured[0].configurations == (SEQUENTIAL_NAME,)
    assert not found.refusals
    # two replicas of a node need an even batch
    odd = predict(records(PROCESSES, batch=6), PredictionRequest(nodes=(2,), link=FAST)).unmeasured
    assert [each.global_batch for each in odd] == [4]


def test_steps_among_several_nodes_take_the_place_of_no_share(records, tmp_path) -> None:
    several = on_two_nodes(tmp_path / "two", "1gbit", transfer_s=0.02)
    request = PredictionRequest(nodes=(2,), transports=("gloo",))
    runs = [*records(SEQUENTIAL, batch=8), several]
    assert not predict(runs, request).unmeasured
    assert [each.global_batch for each in unmeasured_shares(runs, request)] == [4]
    measured = [*runs, *records(SEQUENTIAL, batch=4)]
    assert not unmeasured_shares(measured, request)


def test_a_measured_share_has_its_time_and_others_lie_on_the_line(records) -> None:
    quick = dataclasses.replace(SEQUENTIAL, forward_s=0.1, backward_s=0.2)
    runs = [*records(SEQUENTIAL, batch=8), *records(quick, batch=4)]
    request = PredictionRequest(nodes=(1,), link=FAST, global_batch=6)
    (found,) = predict(runs, request).predictions
    assert found.step_s.estimate == pytest.approx((SEQUENTIAL.step_s + quick.step_s) / 2, rel=0.02)
    assert not found.is_bounded
    (refusal,) = predict(runs, dataclasses.replace(request, global_batch=12)).refusals
    assert "at most 8 samples per node, not with 12" in refusal.reason


def test_the_spread_between_repeats_gives_the_width(records) -> None:
    widths = []
    for jitter in (0.01, 0.1):
        runs = records(SEQUENTIAL, INTRAOP, jitter=jitter, repeats=5, steps=6)
        one = predict(runs, PredictionRequest(nodes=(1,))).predictions[0].step_s
        widths.append(math.log(one.high / one.low) / 2)
    assert widths[1] == pytest.approx(10 * widths[0], rel=0.5)


def test_the_line_of_one_node_contains_the_measurement(records, tmp_path) -> None:
    ways = [SEQUENTIAL, INTRAOP, dataclasses.replace(MPI_GLOO, ranks=2)]
    run = fabricate.make_run(tmp_path / "run", ways, repeats=5, jitter=0.2)
    rows = {
        (r.setup.local_strategy, r.setup.transport): r.speed.samples_per_s
        for r in compare_run(run).rows
    }
    for each in predict(load_run(run), PredictionRequest(nodes=(1,))).predictions:
        measured = rows[each.setup.split()[0], each.transport or "none"]
        assert each.samples_per_s.low <= measured.estimate <= each.samples_per_s.high
        assert each.samples_per_s.estimate == pytest.approx(measured.estimate, rel=0.05)


def test_one_repeat_shows_no_spread(records) -> None:
    (refusal,) = predict(records(SEQUENTIAL, repeats=1), PredictionRequest(nodes=(1,))).refusals
    assert "spread between runs is not known" in refusal.reason


def test_a_run_without_measured_steps_says_so(records) -> None:
    (refusal,) = predict(records(SEQUENTIAL, steps=2), PredictionRequest(nodes=(1,))).refusals
    assert refusal.reason == "no step after the warm-up was measured"
    lossy = dataclasses.replace(SEQUENTIAL, batch_norm="per-replica")
    (refusal,) = predict(records(lossy), PredictionRequest(nodes=(1,))).refusals
    assert "no trial trains what the baseline does" in refusal.reason


def test_a_strategy_that_does_not_state_its_exchange_is_refused_by_name(
    records,
) -> None:
    server = dataclasses.replace(MPI_GLOO, local_strategy="parameter-server")
    request = PredictionRequest(nodes=(1, 2), link=FAST, strategies=("parameter-server",))
    found = predict(records(SEQUENTIAL, server), request)
    assert [each.nodes for each in found.predictions] == [1]
    assert all('"parameter-server" does not say' in each.reason for each in found.refusals)


def test_weak_scaling_needs_one_share_only(records) -> None:
    request = PredictionRequest(nodes=(1, 4), link=FAST, transports=("gloo",), scaling="weak")
    found = predict(records(SEQUENTIAL), request)
    assert [(p.nodes, p.global_batch) for p in found.predictions] == [(1, 8), (4, 32)]
    assert not found.refusals


def test_more_nodes_than_samples_or_steps_are_refused(records) -> None:
    runs = records(SEQUENTIAL, batch=8)
    found = predict(runs, PredictionRequest(nodes=(16,), link=FAST, transports=("gloo",)))
    assert "less than one sample" in found.refusals[0].reason
    request = PredictionRequest(nodes=(100,), link=FAST, transports=("gloo",), scaling="weak")
    assert "36 steps" in predict(records(SEQUENTIAL), request).refusals[0].reason


def test_without_a_link_it_says_what_to_give(records) -> None:
    (refusal,) = predict(records(MPI_GLOO), PredictionRequest(nodes=(2,), scaling="weak")).refusals
    assert "--link 10gbit" in refusal.measure


def test_links_of_different_rates_are_not_one(records, tmp_path) -> None:
    alone = [*records(SEQUENTIAL, batch=8), *records(SEQUENTIAL, batch=4)]
    fast = on_two_nodes(tmp_path / "fast", "1gbit", transfer_s=0.02)
    slow = on_two_nodes(tmp_path / "slow", "100mbit", transfer_s=0.2)
    request = PredictionRequest(nodes=(2,), transports=("gloo",))
    found = predict([*alone, fast, slow], request)
    assert not found.predictions
    (refusal,) = found.refusals
    assert refusal.reason == "trials on several nodes have different links: 100mbit, 1gbit"
    assert refusal.measure == "choose one (--link 1gbit)"
    # a slow link does not tell how fast hosts move bytes
    chosen = dataclasses.replace(request, link=given_link(1e12, 1e-9))
    both = predict([*alone, slow, fast], chosen).predictions[0]
    assert both.exposed_s == predict([*alone, fast], chosen).predictions[0].exposed_s


def on_two_nodes(root: Path, link: str, transfer_s: float) -> TrialRecord:
    """Return a trial with one sum after the last gradient of each step, on lab hosts."""

    def rows(rank, step, ready_s):
        yield made.row(rank, step.step, ready_s, ready_s + transfer_s, payload_bytes=164)

    way = dataclasses.replace(
        SEQUENTIAL, launcher="mpi", transport="gloo", nodes=2, transfer_s=transfer_s
    )
    several = fabricate.make_one(root, way, case=fabricate.Case(steps=20))
    return with_link(made.in_each_step(several, rows), link)


def with_link(record: TrialRecord, link: str) -> TrialRecord:
    ranks = []
    for rank in record.ranks:
        assert rank.environment is not None
        environment = dataclasses.replace(rank.environment, link=link)
        ranks.append(dataclasses.replace(rank, environment=environment))
    return dataclasses.replace(record, ranks=ranks)


def test_a_run_without_transport_is_predicted_over_one(records) -> None:
    found = predict(records(SEQUENTIAL), PredictionRequest(nodes=(2,), scaling="weak", link=FAST))
    assert [each.transport for each in found.predictions] == ["gloo"]
    assert "gloo between nodes: the run has no transport" in found.assumptions


def test_a_slow_link_adds_the_time_of_the_gradients(records) -> None:
    # 164 bytes at 1 kbit/s, 85 to 94 % of which are data: 2 nodes send each byte once
    request = PredictionRequest(
        nodes=(2,), link=given_link(1e3, 1e-6), transports=("gloo",), scaling="weak"
    )
    (found,) = predict(records(SEQUENTIAL), request).predictions
    low, high = 8 * 164 / 1e3 / 0.94 - 0.6, 8 * 164 / 1e3 / 0.85
    assert low <= found.exposed_s <= high
    assert found.step_s.estimate == pytest.approx(SEQUENTIAL.step_s + found.exposed_s, rel=0.1)


def test_the_slowest_node_waits_longer_among_more_nodes(records) -> None:
    request = PredictionRequest(nodes=(1, 4, 16), link=FAST, transports=("gloo",), scaling="weak")
    found = predict(records(SEQUENTIAL, steps=60, jitter=0.1), request).predictions
    waiting = [p.waiting_s for p in found]
    assert waiting[0] == 0
    # the largest of 4 and 16 normal variables: 1.03 and 1.77 deviations above the mean
    assert waiting[1] == pytest.approx(0.1 * 1.03 * SEQUENTIAL.step_s, rel=0.4)
    assert waiting[2] == pytest.approx(0.1 * 1.77 * SEQUENTIAL.step_s, rel=0.4)


def test_messages_after_the_last_gradient_have_their_own_rate(records, tmp_path) -> None:
    def rows(rank, step, ready_s):
        half = {"payload_bytes": 82}  # of 41 parameters
        yield made.row(rank, 2 * step.step, ready_s - 0.1, ready_s - 0.02, **half)
        yield made.row(rank, 2 * step.step + 1, ready_s, ready_s + 0.02, **half)

    way = dataclasses.replace(
        SEQUENTIAL, launcher="mpi", transport="gloo", nodes=2, transfer_s=0.02
    )
    several = fabricate.make_one(tmp_path / "two", way, case=fabricate.Case(steps=20))
    runs = [*records(SEQUENTIAL, batch=8), *records(SEQUENTIAL, batch=4)]
    request = PredictionRequest(nodes=(2,))
    (found,) = predict([*runs, made.in_each_step(several, rows)], request).predictions
    assert found.exposed_s == pytest.approx(0.02, rel=0.1)


def test_more_micro_batches_shrink_the_bubble(records) -> None:
    way = dataclasses.replace(PIPELINE, stages=2, micro_batches=4)
    times = [
        predict(records(way), PredictionRequest(nodes=(1,), micro_batches=m))
        .predictions[0]
        .step_s.estimate
        for m in (4, 8)
    ]
    assert times[1] / times[0] == pytest.approx((9 / 8) / (5 / 4), rel=5e-3)


def test_only_wanted_strategies_are_predicted(records) -> None:
    found = predict(
        records(SEQUENTIAL, PIPELINE),
        PredictionRequest(nodes=(1,), strategies=("pipe*",)),
    )
    assert [p.setup.split()[0] for p in found.predictions] == ["pipeline"]


def test_a_thousand_nodes_are_predicted(records) -> None:
    runs = records(SEQUENTIAL, steps=1100, jitter=0.05)
    request = PredictionRequest(
        nodes=tuple(range(1, 1025)), link=FAST, transports=("gloo",), scaling="weak"
    )
    steps = [p.step_s.estimate for p in predict(runs, request).predictions]
    assert len(steps) == 1024
    assert steps[-1] > steps[0]


def test_the_slowest_node_does_not_slow_the_link(records) -> None:
    link = given_link(1e3, 1e-6)
    request = PredictionRequest(nodes=(2,), link=link, transports=("gloo",), scaling="weak")
    (still,) = predict(records(SEQUENTIAL, steps=60), request).predictions
    (found,) = predict(records(SEQUENTIAL, steps=60, jitter=0.3), request).predictions
    assert still.waiting_s == 0
    assert found.waiting_s > 0.1 * SEQUENTIAL.step_s
    assert found.exposed_s == pytest.approx(still.exposed_s, rel=0.1)
    parts_s = found.node_s + found.waiting_s + found.exposed_s
    # each is the median of draws, and medians of sums are not the sums of medians
    assert found.step_s.estimate == pytest.approx(parts_s, rel=0.06)
