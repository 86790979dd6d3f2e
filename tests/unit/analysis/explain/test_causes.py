"""Every cause is named first with its share; equal configurations have none."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from tests.unit.analysis.ways import MPI, PIPELINE, SEQUENTIAL, Way

from paceline.analysis.explain.explanation import ExplainedTrials, Explanation, explain
from paceline.analysis.trial.reading import load_run

ALONE = dataclasses.replace(SEQUENTIAL, cpu_percent=50.0, full_trace=True)  # one of two cores
PEERS = dataclasses.replace(MPI, cpu_percent=95.0, full_trace=True, network_bytes_per_s=5e6)


@pytest.fixture
def explained(fabricate: ModuleType, tmp_path: Path) -> Any:
    def run(first: Way, second: Way, repeats: int = 4, jitter: float = 0.01) -> Explanation:
        sides = []
        for name, way in (("first", first), ("second", second)):
            case = fabricate.Case(steps=20, warmup_steps=2)
            root = tmp_path / name
            files = fabricate.make_run(root, [way], cases=[case], repeats=repeats, jitter=jitter)
            sides.append(ExplainedTrials(name, load_run(files)))
        return explain(sides[0], sides[1], {})

    return run


def slowed(way: Way, factor: float, **changes: Any) -> Way:
    """Return the way with its computation and optimiser that much slower."""
    return dataclasses.replace(
        way,
        forward_s=way.forward_s * factor,
        backward_s=way.backward_s * factor,
        optimizer_s=way.optimizer_s * factor,
        other_s=way.other_s * factor,
        **changes,
    )


CASES = {
    "cpu_quota": (ALONE, slowed(ALONE, 2, cpu_percent=25.0, throttled_percent=48.0)),
    "steal": (ALONE, slowed(ALONE, 1.25, cpu_percent=40.0, steal_percent=10.0)),
    # CPU time per step is what it was, but half of it on the cores that it had
    "competition": (
        ALONE,
        slowed(ALONE, 2, cpu_percent=75.0, others_percent=50.0, cpu_pressure_percent=40.0),
    ),
    # the run keeps its core, but needs more of its time
    "memory_contention": (ALONE, slowed(ALONE, 1.4, cpu_percent=98.0, others_percent=48.0)),
    "frequency": (ALONE, slowed(ALONE, 1.25, frequency_hertz=2e9)),
    "own_threads": (
        ALONE,
        slowed(ALONE, 1.5, cpu_percent=75.0, run_threads=8, switches_per_s=400.0),
    ),
    "oversubscription": (
        dataclasses.replace(PEERS, affinity=(0, 1)),
        slowed(PEERS, 1.5, threads=2, affinity=(0, 1), allocated_cores=2, switches_per_s=900.0),
    ),
    "slow_rank": (PEERS, dataclasses.replace(PEERS, backward_s=0.4, lead_s=0.2)),
    "cold_cache": (ALONE, dataclasses.replace(ALONE, data_wait_s=0.3, disk_bytes_per_s=2e7)),
    "storage": (ALONE, dataclasses.replace(ALONE, data_wait_s=0.3, iowait_percent=20.0)),
    "decoding": (
        dataclasses.replace(ALONE, cpu_percent=95.0),
        dataclasses.replace(ALONE, data_wait_s=0.3, cpu_percent=95.0),
    ),
    "slow_reader": (ALONE, dataclasses.replace(ALONE, data_wait_s=0.3)),
    # the same bytes take longer: 5 MB/s x 0.345 s = 2.1 MB/s x 0.825 s
    "slow_link": (
        PEERS,
        dataclasses.replace(PEERS, transfer_s=PEERS.transfer_s + 0.5, network_bytes_per_s=2.1e6),
    ),
    "more_traffic": (
        PEERS,
        dataclasses.replace(PEERS, transfer_s=PEERS.transfer_s + 0.2, network_bytes_per_s=1e7),
    ),
    "layer_communication": (
        PEERS,
        dataclasses.replace(PEERS, pass_comm_s=0.3, network_bytes_per_s=2.8e6),
    ),
    "transport": (
        PEERS,
        dataclasses.replace(PEERS, transport="gloo", transfer_s=PEERS.transfer_s + 0.2),
    ),
    "pipeline_bubble": (
        dataclasses.replace(PIPELINE, bubble_s=0.02),
        dataclasses.replace(PIPELINE, bubble_s=0.4, micro_batches=2),
    ),
}  # fmt: skip


@pytest.mark.parametrize("cause", CASES)
def test_a_seeded_cause_is_named_first_with_its_share(explained, cause) -> None:
    faster, slower = CASES[cause]
    found = explained(faster, slower)
    assert found.difference.is_significant
    assert [c.name for c in found.causes][:1] == [cause], found.causes
    assert found.causes[0].share == pytest.approx(1.0, abs=0.15)
    assert found.causes[0].evidence


def test_a_difference_that_may_be_chance_has_no_cause(explained) -> None:
    found = explained(ALONE, slowed(ALONE, 1.005, throttled_percent=20.0), jitter=0.05)
    assert not found.difference.is_significant
    assert found.causes == ()


def test_waiting_for_data_includes_the_cores_that_it_relieves(explained) -> None:
    waiting = dataclasses.replace(ALONE, data_wait_s=0.3, disk_bytes_per_s=2e7)
    found = explained(ALONE, slowed(waiting, 0.9, cpu_percent=33.0))
    (cause,) = found.causes
    assert cause.name == "cold_cache"
    assert cause.share == pytest.approx(1.0, abs=0.001)
    # 0.29 s of waiting, less a tenth of 0.625 s on the core
    assert cause.difference_s == pytest.approx(0.2275, rel=0.02)
    assert set(cause.parts) == {"data_wait", "computation", "optimizer", "other"}


def test_half_the_cores_explain_the_time_that_doubling_them_saves(explained) -> None:
    both = slowed(dataclasses.replace(ALONE, local_strategy="intraop"), 0.5, threads=2)
    both = dataclasses.replace(both, cpu_percent=99.0, threads=2, data_wait_s=0.01)
    found = explained(both, dataclasses.replace(ALONE, cpu_percent=49.5))
    assert found.causes[0].name == "fewer_cores"
    assert found.causes[0].share == pytest.approx(1.0, abs=0.1)


def test_a_slower_part_without_evidence_is_named_by_the_part_alone(explained) -> None:
    found = explained(ALONE, dataclasses.replace(ALONE, other_s=0.2, cpu_percent=50.0))
    (cause,) = found.causes
    assert (cause.name, cause.has_evidence) == ("other", False)
    assert cause.difference_s == pytest.approx(0.195, rel=0.05)


@pytest.mark.parametrize("names", [("cpu_quota", "slow_rank"), ("slow_link", "cold_cache")])
def test_parts_and_factors_add_up_exactly(explained, names) -> None:
    for faster, slower in (CASES[name] for name in names):
        found = explained(faster, slower)
        whole = found.difference.difference_s.mean
        parts = sum(part.difference_s.mean for part in found.difference.parts)
        assert parts == pytest.approx(whole, rel=1e-9)
        remainder = found.difference.part("remainder").difference_s.mean
        assert abs(remainder) <= 0.03 * abs(whole)
        on_cores = ("computation", "optimizer", "other", "remainder")
        expected = sum(found.difference.part(name).difference_s.mean for name in on_cores)
        assert sum(f.difference_s for f in found.factors) == pytest.approx(expected, rel=1e-6)


def test_without_traces_parts_are_explained_and_causes_named_by_part(
    fabricate: ModuleType, tmp_path: Path
) -> None:
    files = fabricate.make_run(tmp_path, [ALONE, slowed(ALONE, 1.5, precision="bf16")], repeats=3)
    for _, trial in files.trials():
        for _, host in trial.hosts():
            host.trace.unlink()
    sides: dict[str, list[Any]] = {}
    for record in load_run(files):
        sides.setdefault(record.trial.configuration, []).append(record)
    first, second = (ExplainedTrials(name, records) for name, records in sides.items())
    found = explain(first, second, {})
    assert found.factors == ()
    assert [c.name for c in found.causes] == ["computation"]
    assert np.isclose(found.causes[0].difference_s, 0.3)
