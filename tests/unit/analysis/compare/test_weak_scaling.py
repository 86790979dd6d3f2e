"""Speeds with a constant batch for each replica are compared across global batches."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.unit.analysis import fabricate
from tests.unit.analysis.fabricate import PER_REPLICA, Way, scaled_way

from paceline.analysis.compare.run import Comparison, compare_run
from paceline.analysis.compare.weak_scaling import WeakScaling

STEP_S = 0.635  # of one replica


def compared(root: Path, *ways: Way) -> Comparison:
    return compare_run(fabricate.make_weak_scaling(root, *ways))


def replicas_of(found: WeakScaling) -> list[int]:
    return [point.replicas for point in found.points]


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    more = scaled_way(ranks=4, transfer_s=0.1)
    return compared(tmp_path_factory.mktemp("workers"), scaled_way(), more)


def test_efficiency_is_the_step_of_one_replica_over_that_of_all(workers: Comparison) -> None:
    (found,) = workers.weak_scaling
    assert (found.workload, found.batch_per_replica) == ("tiny", PER_REPLICA)
    assert (found.launcher, found.transport, found.local_strategy) == ("mpi", "gloo", "processes")
    assert found.one_replica == "tiny-batch8.local.none.sequential.n1r1t1.fp32"
    assert [(p.replicas, p.global_batch) for p in found.points] == [(1, 8), (2, 16), (4, 32)]
    for point, transfer_s in zip(found.points, (0.0, 0.03, 0.1), strict=True):
        efficiency = STEP_S / (STEP_S + transfer_s)
        assert point.efficiency.estimate == pytest.approx(efficiency, rel=0.01)
        assert point.throughput.estimate == pytest.approx(point.replicas * efficiency, rel=0.01)
        assert point.efficiency.low <= point.efficiency.estimate <= point.efficiency.high


def test_each_global_batch_has_its_own_baseline_and_verdict(workers: Comparison) -> None:
    assert workers.workloads == ["tiny-batch8", "tiny-batch16", "tiny-batch32"]
    baselines = {f"{name}.local.none.sequential.n1r1t1.fp32" for name in workers.workloads}
    assert set(workers.sequential.values()) == baselines
    row = workers.row("tiny-batch16.mpi.gloo.processes.n1r2t1.fp32")
    # one process takes twice as long for 16 samples, but for 0.035 s
    assert row.speed.speedup.estimate == pytest.approx(1.235 / 0.665, rel=0.01)
    assert all(row.equivalence.equivalent for row in workers.rows)


def test_global_batches_of_a_workload_are_in_order(tmp_path: Path) -> None:
    run = fabricate.make_weak_scaling(tmp_path, scaled_way(), replicas=(4, 1, 2))
    assert compare_run(run).workloads == ["tiny-batch8", "tiny-batch16", "tiny-batch32"]


def test_hosts_and_workers_are_two_scalings(tmp_path: Path) -> None:
    two, four = scaled_way(), scaled_way(ranks=4)
    found = compared(tmp_path, two, four, scaled_way(nodes=2)).weak_scaling
    assert [each.replicas_per_node for each in found] == [2, None]
    names = [[p.configuration.split(".")[4] for p in each.points] for each in found]
    assert names == [["n1r1t1", "n1r2t1", "n2r2t1"], ["n1r1t1", "n1r2t1", "n1r4t1"]]


def test_workers_of_one_node_alone_are_part_of_the_scaling_over_nodes(tmp_path: Path) -> None:
    (found,) = compared(tmp_path, scaled_way(), scaled_way(nodes=2)).weak_scaling
    assert (found.replicas_per_node, replicas_of(found)) == (2, [1, 2, 4])


def test_strategy_with_one_replica_is_the_reference_of_its_own_scaling(tmp_path: Path) -> None:
    threads = {"local_strategy": "intraop", "ranks": 1, "threads": 2, "forward_s": 0.1}
    alone = scaled_way(**threads, transport="none")
    (found,) = compared(tmp_path, alone, scaled_way(**threads, nodes=2)).weak_scaling
    assert found.one_replica == "tiny-batch8.mpi.none.intraop.n1r1t2.fp32"
    assert replicas_of(found) == [1, 2]
    assert found.points[1].efficiency.estimate == pytest.approx(0.535 / 0.565, rel=0.01)


def test_without_an_equal_replica_there_is_no_efficiency(tmp_path: Path) -> None:
    (found,) = compared(tmp_path, scaled_way(threads=2)).weak_scaling
    assert found.one_replica is None
    (point,) = found.points
    assert (point.throughput, point.efficiency) == (None, None)
    assert point.samples_per_s is not None


def test_another_training_has_a_speed_but_no_efficiency(tmp_path: Path) -> None:
    (found,) = compared(tmp_path, scaled_way(weights_error=1.0, gradient_error=1.0)).weak_scaling
    one, two = found.points
    assert (one.efficiency.estimate, two.efficiency, two.equivalent) == (1.0, None, False)
    assert two.samples_per_s is not None


def test_training_that_is_lossy_on_purpose_has_an_efficiency(tmp_path: Path) -> None:
    (found,) = compared(tmp_path, scaled_way(batch_norm="per-replica")).weak_scaling
    two = found.points[1]
    assert two.equivalent is None
    assert two.efficiency.estimate == pytest.approx(STEP_S / (STEP_S + 0.03), rel=0.01)


def test_launchers_are_scalings_of_their_own(tmp_path: Path) -> None:
    spark = scaled_way(launcher="spark")
    found = compared(tmp_path, scaled_way(), scaled_way(ranks=4), spark).weak_scaling
    assert [(each.launcher, replicas_of(each)) for each in found] == [
        ("mpi", [1, 2, 4]),
        ("spark", [1, 2]),
    ]


def test_one_global_batch_has_no_weak_scaling(tmp_path: Path) -> None:
    run = fabricate.make_run(tmp_path, [fabricate.SEQUENTIAL, scaled_way()])
    comparison = compare_run(run)
    assert comparison.weak_scaling == ()
    assert comparison.to_json()["weak_scaling"] == []
