"""The search for the largest batch, on a machine whose memory is fabricated."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
from tests.unit.tune.conftest import SPEC

from paceline.analysis.statistics import series
from paceline.errors import EnvironmentLacks, ExitCode, RankFailed
from paceline.records.layout import RunFiles
from paceline.spec.loading import parse_spec
from paceline.tune.batch import search
from paceline.tune.batch.prediction import Predicted, batch_that_fits

MIB = 2**20
PROCESSES = """
[[trials]]
launcher = "local"
local_strategy = "processes"
ranks_per_node = 2
oversubscribe = true
"""


def predicted(batch, ranks=1):
    """100 MiB for each rank, and 1 MiB for each sample."""
    return Predicted(global_batch=batch, ranks=[100 * MIB] * ranks, shared=batch * MIB)


class Machine:
    """Runs trials that need `factor` of what is predicted, with 5 samples/s."""

    def __init__(self, factor=1.0, samples=1000, exit_code=ExitCode.ENVIRONMENT):
        self.factor, self.samples, self.exit_code = factor, samples, exit_code
        self.ran = []

    def run_trial(self, trial, files):
        batch, ranks = trial.training.global_batch, trial.placement.ranks
        self.ran.append((batch, trial.limits.rank_memory_mib))
        need = self.factor * predicted(batch, ranks).total
        for rank in range(ranks):
            places = files.rank(rank)
            places.root.mkdir(parents=True, exist_ok=True)
            row = {"peak_private_bytes": int(need / ranks), "shared_bytes": 0}
            places.memory.write_text(json.dumps(row))
        if need <= self.bound:
            return SimpleNamespace(status="ok", exit_code=0, message="")
        return SimpleNamespace(
            status="failed", exit_code=self.exit_code, message="too much", failed_rank=0
        )


@pytest.fixture
def find(monkeypatch, tmp_path):
    def run(machine, bound_mib, request=0):
        experiment = parse_spec(SPEC + PROCESSES, "mine.toml")
        machine.bound = bound_mib * MIB
        rows = SimpleNamespace(row_group_rows=[machine.samples])
        rate = series(np.full(3, 5.0), "t")
        monkeypatch.setattr(search, "open_dataset", lambda _: rows)
        monkeypatch.setattr(search, "run_trial", machine.run_trial)
        monkeypatch.setattr(search, "load_trial", lambda _: None)
        monkeypatch.setattr(search, "trial_speed", lambda _: rate)
        monkeypatch.setattr(
            search,
            "predict_memory",
            lambda trial, batches: [predicted(b, trial.placement.ranks) for b in batches],
        )
        one = search._Search(
            experiment,
            experiment.workloads[0],
            experiment.trials[request],
            {"tiny": "/data"},
            machine.bound,
        )
        progress = SimpleNamespace(trial_started=lambda *_: 0, trial_ended=lambda *_: 0)
        return one.run(RunFiles(tmp_path), progress)

    return run


def test_predicted_batch_is_measured_with_two_smaller_ones(find):
    machine = Machine()
    found = find(machine, 300)
    assert (found.largest_batch, found.limited_by) == (200, "memory")
    assert [p.global_batch for p in found.probes] == [50, 100, 200]
    assert [p.measured_bytes for p in found.probes] == [150 * MIB, 200 * MIB, 300 * MIB]
    assert [p.samples_per_s for p in found.probes] == pytest.approx([5.0] * 3)


def test_batch_that_does_not_fit_is_a_finding_and_a_smaller_one_is_tried(find):
    found = find(Machine(factor=1.1), 300)
    assert found.largest_batch == 170
    assert [(p.global_batch, p.reason) for p in found.probes if p.measured_bytes is None] == [
        (200, "too much")
    ]


def test_batches_that_fit_and_that_of_the_spec_are_trained(monkeypatch, tmp_path):
    evaluated = "[training]\nglobal_batch = 32\nheld_out_samples = 20\n"
    experiment = parse_spec(SPEC + evaluated, "mine.toml")
    rows = SimpleNamespace(row_group_rows=[110])
    monkeypatch.setattr(search, "open_dataset", lambda _: rows)
    predict = lambda trial, batches: [predicted(b, trial.placement.ranks) for b in batches]  # noqa: E731
    monkeypatch.setattr(search, "predict_memory", predict)
    one = search._Search(
        experiment, experiment.workloads[0], experiment.trials[0], {"tiny": "/d"}, 300 * MIB
    )
    probes = [
        search.Probe(global_batch=batch, predicted_bytes=1, measured_bytes=fits)
        for batch, fits in ((50, 1), (100, 1), (200, None))
    ]
    found = search.BatchFinding(
        workload="tiny", configuration="c", largest_batch=100, limited_by="memory", probes=probes
    )
    asked = {}

    def run(batches, limit_mib, files, progress):
        del files, progress
        asked["batches"] = sorted(set(batches))
        asked["limit"] = limit_mib(one.trial(50))
        return []

    training = one.training()
    monkeypatch.setattr(training, "run", run)
    assert one.train(training, found, RunFiles(tmp_path), None).trained == []
    assert asked == {"batches": [32, 50, 90], "limit": 250}  # 90 samples are left to train on


def test_no_batch_fits(find):
    found = find(Machine(factor=3.0), 300)
    assert found.largest_batch is None
    assert len(found.probes) == 4


def test_data_set_limits_the_batch(find):
    found = find(Machine(samples=64), 300)
    assert (found.largest_batch, found.limited_by) == (64, "samples")


def test_ranks_share_what_shared_memory_leaves(find):
    machine = Machine()
    found = find(machine, 401, request=1)
    assert found.largest_batch == 200  # a multiple of the replicas
    assert machine.ran[0] == (200, 100)  # (401 - 200) MiB for two ranks


def test_other_failures_end_the_search(find):
    with pytest.raises(RankFailed, match="too much"):
        find(Machine(factor=1.1, exit_code=ExitCode.RANK_FAILED), 300)


def test_line_through_two_predictions():
    assert batch_that_fits(predicted(10), predicted(50), 300 * MIB) == 200
    assert batch_that_fits(predicted(10), predicted(50), 90 * MIB) == 0


def test_more_memory_than_there_is_is_refused(monkeypatch):
    monkeypatch.setattr(search, "available_bytes", lambda: 1000 * MIB)
    assert search.bound_of(None) == 800 * MIB
    assert search.bound_of(900) == 900 * MIB
    with pytest.raises(EnvironmentLacks, match="at most the 1000 MiB"):
        search.bound_of(1001)
