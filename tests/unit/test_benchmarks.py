"""Benchmarks: generated run directories can be read, and simulated collectives are right."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path
from types import ModuleType

import pytest

from paceline.analysis.compare.run import compare_run
from paceline.records.layout import RunFiles

BENCHMARKS = Path(__file__).parents[2] / "python" / "benchmarks"


def test_generated_run_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    benchmark = importlib.import_module("analysis")
    run = RunFiles(tmp_path / "run")
    benchmark.generate(run, argparse.Namespace(configurations=3, repeats=2, steps=40))
    rows = compare_run(run).rows
    assert [row.repeats for row in rows] == [2, 2, 2]
    assert all(row.equivalent for row in rows)


@pytest.fixture
def simulation(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The simulation of collectives; the test is skipped without SimGrid."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    module = importlib.import_module("simulation")
    reason = module.why_not()
    if reason is not None:
        pytest.skip(reason)
    return module


def test_without_contention_the_simulated_time_is_that_of_the_formulas(
    simulation: ModuleType,
) -> None:
    job = importlib.import_module("simulation_job")
    values = {"payload_bytes": 10**6, "latency_s": 1e-4, "bytes_per_s": 1e8}
    jobs = [job.Simulation(algorithm=each, ranks=5, **values) for each in job.SCHEDULES]
    # A rank beyond a power of two sends to its neighbour while all others wait.
    assert simulation.simulate(jobs) == pytest.approx([each.formula_s for each in jobs], rel=1e-6)
    ring = job.Simulation(algorithm="ring", ranks=40, **values)
    assert ring.simulated_messages < ring.cost.messages  # its equal rounds are extrapolated
    assert simulation.simulate([ring]) == pytest.approx([ring.formula_s], rel=1e-6)


def test_racks_share_their_uplinks(simulation: ModuleType) -> None:
    """Two racks of two hosts; the uplinks are half as fast as one host's link.

    Recursive doubling: first within the racks (1), then both hosts of a rack over its uplink (4).
    """
    job = importlib.import_module("simulation_job")
    racks = job.Topology(rack_hosts=2, oversubscription=4.0)
    rounds, path = simulation.contended_cost("recursive-doubling", 4, racks)
    assert path == pytest.approx(1 + 4)
    assert rounds == pytest.approx(1 + 2)  # twice the cables between racks
