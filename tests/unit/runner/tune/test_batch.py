"""The search for the largest batch, on a machine whose memory is fabricated."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
from tests.support.specs import spec_text
from tests.unit.runner.tune.conftest import SPEC, Watcher

from paceline.analysis.statistics.rates import repeat_rate
from paceline.base.errors import EnvironmentLacks, ExitCode, RankFailed, UsageError
from paceline.measure.records.layout import RunFiles
from paceline.plan.spec.loading import Spec, parse_spec
from paceline.runner.tune import batch as search
from paceline.runner.tune.comm import COMM_SEARCH
from paceline.runner.tune.local import LOCAL_SEARCH
from paceline.runner.tune.session import plan_search, run_search

MIB = 2**20
PROCESSES = """
[[trials]]
launcher = "local"
local_strategy = "processes"
ranks_per_node = 2
oversubscribe = true
"""


class Machine:
    """Ranks need 100 MiB each, and 1 MiB for each sample times `factor`; 5 samples/s."""

    def __init__(self, factor=1.0, samples=1000, exit_code=ExitCode.ENVIRONMENT):
        self.factor, self.samples, self.exit_code = factor, samples, exit_code
        self.ran = []

    def run_trial(self, trial, files):
        batch, ranks = trial.training.global_batch, trial.placement.ranks
        self.ran.append((batch, trial.limits.rank_memory_mib))
        need = (100 * ranks + self.factor * batch) * MIB
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
        rate = repeat_rate(np.full(3, 5.0), np.ones(3))
        monkeypatch.setattr(search, "open_dataset", lambda _: rows)
        monkeypatch.setattr("paceline.runner.trials.run_trial.run_trial", machine.run_trial)
        monkeypatch.setattr(search, "load_trial", lambda _: None)
        monkeypatch.setattr(search, "trial_speed", lambda _: rate)
        one = search._TrialSearch(
            experiment,
            experiment.workloads[0],
            experiment.trials[request],
            {"tiny": "/data"},
            machine.bound,
        )
        progress = SimpleNamespace(trial_started=lambda *_: 0, trial_ended=lambda *_: 0)
        return one.run(RunFiles(tmp_path), progress)

    return run


def test_batches_double_until_the_line_meets_the_bound(find):
    machine = Machine()
    found = find(machine, 300)
    assert (found.largest_batch, found.limited_by) == (200, "memory")
    # 32 samples are usual; each batch doubles, and the last is where the line meets 300 MiB
    assert [p.global_batch for p in found.probes] == [8, 16, 32, 64, 128, 200]
    assert [batch for batch, _ in machine.ran] == [8, 16, 32, 64, 128, 200]
    assert found.probes[-1].measured_bytes == 300 * MIB
    assert [p.samples_per_s for p in found.probes] == pytest.approx([5.0] * 6)


def test_batch_that_does_not_fit_is_a_finding_and_a_smaller_one_is_tried(find):
    class Growing(Machine):
        """Needs more than the line says for batches above 128."""

        def run_trial(self, trial, files):
            self.factor = 1.0 if trial.training.global_batch <= 128 else 1.5
            return super().run_trial(trial, files)

    found = find(Growing(), 300)
    assert found.largest_batch == 128
    assert [(p.global_batch, p.reason) for p in found.probes if not p.fits] == [
        (137, "too much"),
        (146, "too much"),
        (164, "too much"),
        (200, "too much"),
    ]


def test_no_batch_fits(find):
    found = find(Machine(factor=300.0), 300)
    assert found.largest_batch is None
    assert [p.global_batch for p in found.probes] == [1, 2, 4, 8]


def test_data_set_limits_the_batch(find):
    found = find(Machine(samples=60), 300)
    assert (found.largest_batch, found.limited_by) == (60, "samples")


def test_ranks_share_the_bound(find):
    machine = Machine()
    assert find(machine, 401, request=1).largest_batch == 200  # a multiple of the replicas
    assert machine.ran[0][1] == 401  # nothing is known about the parts of the ranks
    assert {limit for _, limit in machine.ran[1:]} == {200}


def test_part_of_a_rank_follows_from_the_largest_batch_that_fits():
    finding = search.BatchSearch(usual=32, most=100, replicas=2, bound_bytes=1000 * MIB)
    finding.probes.append(
        search.BatchProbe(
            global_batch=8, private_bytes=[300 * MIB, 100 * MIB], shared_bytes=200 * MIB
        )
    )
    assert finding.rank_limit_mib() == 600  # three quarters of what shared memory leaves


def test_other_failures_end_the_search(find):
    with pytest.raises(RankFailed, match="too much"):
        find(Machine(factor=300.0, exit_code=ExitCode.RANK_FAILED), 300)


def test_more_memory_than_there_is_is_refused(monkeypatch):
    monkeypatch.setattr(search, "available_bytes", lambda: 1000 * MIB)
    assert search.bound_of(None) == 800 * MIB
    assert search.bound_of(900) == 900 * MIB
    with pytest.raises(EnvironmentLacks, match="at most the 1000 MiB"):
        search.bound_of(1001)


def test_several_global_batches_are_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(search, "available_bytes", lambda: 1000 * MIB)
    text = spec_text(tables="[training]; max_steps = 8; batch_per_replica = 8")
    spec = Spec(parse_spec(text, "mine.toml"), text)
    with pytest.raises(UsageError, match=r"paceline tune batch: .* got batch_per_replica = 8"):
        search.tune_batch(spec, tmp_path / "out", memory_mib=None, progress=Watcher())
    for method, name in ((LOCAL_SEARCH, "local"), (COMM_SEARCH, "comm")):
        with pytest.raises(UsageError, match=f"paceline tune {name}: a search compares"):
            plan_search(method, spec)
        with pytest.raises(UsageError, match=f"paceline tune {name}: a search compares"):
            run_search(method, spec, tmp_path / name, resume=False, progress=Watcher())
    assert list(tmp_path.iterdir()) == []
