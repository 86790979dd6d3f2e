"""Cores that strangers had while trials trained: told where it matters, to the percent."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import pytest

from paceline.analysis.disturbance import disturbance, disturbance_flags
from paceline.analysis.reading import HostTrace, TrialRecord, load_run
from paceline.analysis.usage import span_on_host

if TYPE_CHECKING:
    from pathlib import Path
    from types import ModuleType

STATES = ("user", "system", "idle", "iowait", "steal", "other")
# A host of two cores, second by second: what its own programs and strangers compute.
QUIET = {"user": 1.8, "system": 0.1, "idle": 0.1, "iowait": 0.0, "steal": 0.0, "other": 0.0}


@pytest.fixture
def record(fabricate: ModuleType, tmp_path: Path) -> TrialRecord:
    (record,) = load_run(fabricate.make_run(tmp_path, [fabricate.MPI]))
    return record


def traced(
    record: TrialRecord,
    per_second: dict[str, float],
    run_cores: float,
    host: str = "node0",
    boot_id: str | None = None,
    seconds: int = 5,
) -> HostTrace:
    """Samples within the training, a fifth of its length apart; counters since long ago."""
    (template, *_) = record.hosts[0].samples
    train = span_on_host(record, "node0", "train")
    assert train is not None
    step_s = (train[1] - train[0]) / (seconds + 1)
    samples = [
        dataclasses.replace(
            template,
            unix_s=train[0] + (number + 1) * step_s,
            cpu_seconds={state: 1000.0 + number * per_second[state] for state in STATES},
            run_cpu_seconds=50.0 + number * run_cores,
        )
        for number in range(seconds)
    ]
    return HostTrace(host=host, header={"boot_id": boot_id}, samples=tuple(samples))


def with_hosts(record: TrialRecord, *hosts: HostTrace) -> TrialRecord:
    return dataclasses.replace(record, hosts=hosts)


def test_trial_alone_on_its_machine_is_not_flagged(record: TrialRecord) -> None:
    alone = with_hosts(record, traced(record, QUIET, run_cores=1.88))
    found = disturbance(alone)
    assert found is not None
    assert found.others_percent == pytest.approx(1.0)
    assert disturbance_flags([alone]) == []


def test_strangers_are_flagged_once_with_the_worst_trial(record: TrialRecord) -> None:
    worse = with_hosts(record, traced(record, QUIET, run_cores=1.0))
    bad = with_hosts(record, traced(record, QUIET, run_cores=1.5))
    fine = with_hosts(record, traced(record, QUIET, run_cores=1.9))
    (flag,) = disturbance_flags([bad, worse, fine])
    assert flag == (
        f"other programs took 45 % of the cores while {record.trial.id} trained, and over 10 % in "
        "2 of 3 trials: run again when nothing else runs"
    )


def test_time_that_the_hypervisor_took_is_flagged(record: TrialRecord) -> None:
    robbed = {**QUIET, "user": 1.4, "steal": 0.4}
    (flag,) = disturbance_flags([with_hosts(record, traced(record, robbed, run_cores=1.5))])
    assert flag.startswith("the hypervisor gave 20 % of the cores' time to other machines while")


def test_hosts_of_one_machine_are_no_strangers_to_each_other(record: TrialRecord) -> None:
    hosts = [
        traced(record, QUIET, run_cores=0.94, host=name, boot_id="the same")
        for name in ("node0", "node1")
    ]
    found = disturbance(with_hosts(record, *hosts))
    assert found is not None
    assert found.others_percent == pytest.approx(1.0)


def test_the_worst_of_several_machines_counts(record: TrialRecord) -> None:
    quiet = traced(record, QUIET, run_cores=1.9, host="node0", boot_id="one")
    busy = traced(record, QUIET, run_cores=0.9, host="node1", boot_id="another")
    found = disturbance(with_hosts(record, quiet, busy))
    assert found is not None
    assert found.others_percent == pytest.approx(50.0)


@pytest.mark.parametrize("seconds", [0, 1])
def test_too_few_samples_tell_nothing(record: TrialRecord, seconds: int) -> None:
    sparse = with_hosts(record, traced(record, QUIET, run_cores=1.0, seconds=seconds))
    assert disturbance(sparse) is None
    assert disturbance_flags([sparse]) == []


def test_traces_without_the_kernels_counters_tell_nothing(record: TrialRecord) -> None:
    assert disturbance(record) is None
