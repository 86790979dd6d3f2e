"""What `repeats = "auto"` looks at."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace

import pytest
from tests.unit.analysis import fabricate

from paceline.analysis.trial.reading import load_run
from paceline.plan.spec.values import Target
from paceline.runner.trials.experiment import AutomaticRepeats

EXPERIMENT = SimpleNamespace(max_repeats=8, tie_margin=0.05, limits=SimpleNamespace(run_s=None))


@pytest.fixture
def ranking(tmp_path):
    """Return the rates of two repeats of a baseline, an exact and a lossy configuration, and of one
    that misses the target, by the end of their names."""

    def make(target):
        lossy = dataclasses.replace(fabricate.MPI, compression={"method": "topk"})
        ways = [
            fabricate.SEQUENTIAL,
            fabricate.MPI,
            dataclasses.replace(lossy, learned=1.0),
            dataclasses.replace(lossy, transport="gloo", learned=0.1),
        ]
        case = fabricate.Case(evaluate_every_steps=2, target=target)
        run = fabricate.make_run(tmp_path, ways, cases=[case], repeats=2)
        trials = [record.trial for record in load_run(run)]
        found = AutomaticRepeats(EXPERIMENT, trials, run)._ranking(2)["tiny"]
        return {name.removeprefix("tiny."): rates for name, rates in found.items()}

    return make


def test_without_a_target_exact_configurations_are_compared_by_speed(ranking):
    found = ranking(None)
    assert set(found) == {
        "local.none.sequential.n1r1t1.fp32", "mpi.mpi.processes.n1r2t1.fp32",
    }  # fmt: skip
    rates = found["mpi.mpi.processes.n1r2t1.fp32"]
    assert [math.exp(rates[n].log_rate) for n in (0, 1)] == pytest.approx([8 / 0.345] * 2)


def test_with_a_target_all_that_reach_it_are_compared_by_the_time(ranking):
    found = ranking(Target(metric="accuracy", at_least=0.6))
    times = {name: math.exp(-rates[0].log_rate) for name, rates in found.items()}
    assert times == pytest.approx(
        {
            "local.none.sequential.n1r1t1.fp32": 8 * 0.635,
            "mpi.mpi.processes.n1r2t1.fp32": 8 * 0.345,
            "mpi.mpi.processes.n1r2t1.fp32.send-topk": 12 * 0.345,
        },
        rel=1e-5,
    )
