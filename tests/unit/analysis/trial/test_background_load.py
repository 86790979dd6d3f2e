"""Background CPU load is measured to the percent and reported where it matters."""

from __future__ import annotations

import dataclasses

import polars as pl
import pytest
from tests.unit.analysis import fabricate

from paceline.analysis.trial.load import (
    Disturbance,
    busy_percent,
    disturbance,
    load_of_run,
    load_of_trials,
)
from paceline.analysis.trial.reading import HostTrace, TrialRecord, load_trial
from paceline.analysis.trial.usage import span_on_host
from paceline.measure.records.files import write_json
from paceline.show.report.wording import beside_load, load_words

STATES = ("user", "nice", "system", "idle", "iowait", "steal", "other")
# Seconds per second on a host of two cores
QUIET = {**dict.fromkeys(STATES, 0.0), "user": 1.8, "system": 0.1, "idle": 0.1}


@pytest.fixture
def record(tmp_path):
    return load_trial(fabricate.make_one(tmp_path))


def traced(
    record: TrialRecord,
    per_second: dict[str, float],
    run_cores: float,
    host: str = "node0",
    boot_id: str | None = None,
    seconds: int = 5,
) -> HostTrace:
    """Samples within the training at equal distances."""
    train = span_on_host(record, "node0", "train")
    assert train is not None
    step_s = (train[1] - train[0]) / (seconds + 1)
    samples = pl.DataFrame(
        [
            {
                "unix_s": train[0] + (number + 1) * step_s,
                "cpu_seconds": {state: 1000.0 + number * per_second[state] for state in STATES},
                "run_cpu_seconds": 50.0 + number * run_cores,
            }
            for number in range(seconds)
        ]
    )
    return HostTrace(host=host, header={"boot_id": boot_id}, samples=samples)


def test_trial_alone_on_its_machine_is_not_flagged(record: TrialRecord) -> None:
    found = disturbance(record, [traced(record, QUIET, run_cores=1.88)])
    assert found.others_percent == pytest.approx(1.0)
    assert load_words(load_of_run({"a": found}, ())) == ""
    assert beside_load("a is fast.", load_of_run({"a": found}, ())) == "a is fast."


def test_few_trials_beside_other_work_are_counted_with_the_worst_of_them(
    record: TrialRecord,
) -> None:
    found = {
        name: disturbance(record, [traced(record, QUIET, run_cores=cores)])
        for name, cores in (("bad", 1.5), ("worse", 1.0), ("fine", 1.9), ("good", 1.9))
    }
    assert beside_load("a is fast.", load_of_run(found, ())) == (
        "a is fast; 2 of 4 trials ran beside other work (up to 45 % of the cores)."
    )


@pytest.mark.parametrize(
    ("cores", "run_cores", "taken"),
    [
        (2, 1.0, "one of two cores"),
        (4, 0.7, "two of four cores"),
        (2, 1.6, "15 % of the cores"),
        (None, 1.0, "45 % of the cores"),
    ],
)
def test_load_of_most_trials_comes_first_in_whole_cores(
    record: TrialRecord, cores: int | None, run_cores: float, taken: str
) -> None:
    trace = traced(record, QUIET, run_cores=run_cores)
    trace = dataclasses.replace(trace, header={**trace.header, "cores": cores})
    load = load_of_run({"a": disturbance(record, [trace])}, ())
    assert beside_load("The fastest is a.", load) == (
        f"While other processes took {taken} (1 of 1 trials), the fastest is a."
    )


def test_recorded_load_is_not_computed_again(record: TrialRecord) -> None:
    """The traces of the trial show no load."""
    assert load_of_trials([record]).beside_others == 0
    assert record.outcome is not None
    outcome = dataclasses.replace(
        record.outcome, others_percent=40.0, stolen_percent=5.0, machine_cores=2
    )
    write_json(record.files.outcome, outcome)
    load = load_of_trials([load_trial(record.files)])
    assert load.beside_others == 1
    assert load.by_trial[record.trial.id] == Disturbance(
        others_percent=40.0, stolen_percent=5.0, cores=2
    )


def test_stolen_cpu_time_is_flagged(record: TrialRecord) -> None:
    stolen = {**QUIET, "user": 1.4, "steal": 0.4}
    found = disturbance(record, [traced(record, stolen, run_cores=1.5)])
    assert load_words(load_of_run({"a": found}, ())) == (
        "while other machines took 20 % of the cores (1 of 1 trials)"
    )


def test_hosts_of_one_machine_are_not_background_load_to_each_other(record: TrialRecord) -> None:
    hosts = [
        traced(record, QUIET, run_cores=0.94, host=name, boot_id="the same")
        for name in ("node0", "node1")
    ]
    assert disturbance(record, hosts).others_percent == pytest.approx(1.0)


def test_machine_with_the_highest_load_counts(record: TrialRecord) -> None:
    quiet = traced(record, QUIET, run_cores=1.9, host="node0", boot_id="one")
    busy = traced(record, QUIET, run_cores=0.9, host="node1", boot_id="another")
    assert disturbance(record, [quiet, busy]).others_percent == pytest.approx(50.0)


def test_load_before_a_short_training_counts(record: TrialRecord) -> None:
    inside = traced(record, QUIET, run_cores=1.0, seconds=1)
    before = inside.samples.with_columns(
        pl.col("unix_s") - 1.0,
        pl.struct(pl.col("cpu_seconds").struct.field(s) - QUIET[s] for s in STATES).alias(
            "cpu_seconds"
        ),
        pl.col("run_cpu_seconds") - 0.5,
    )
    trace = dataclasses.replace(inside, samples=pl.concat([before, inside.samples]))
    assert disturbance(record, [trace]).others_percent == pytest.approx(70.0)


@pytest.mark.parametrize("seconds", [0, 1])
def test_too_few_samples_give_no_result(record: TrialRecord, seconds: int) -> None:
    assert disturbance(record, [traced(record, QUIET, run_cores=1.0, seconds=seconds)]) is None


def test_trials_without_a_result_are_not_counted() -> None:
    loaded = Disturbance(others_percent=20.0, stolen_percent=0.0)
    load = load_of_run({"a": loaded, "b": None}, ())
    assert (load.beside_others, load.trials) == (1, 1)


def test_niced_processes_count_and_interrupts_only_as_busy(record: TrialRecord) -> None:
    niced = {**QUIET, "user": 0.9, "nice": 0.9}
    found = disturbance(record, [traced(record, niced, run_cores=0.98)])
    assert found.others_percent == pytest.approx(46.0)
    assert found.is_load
    interrupts = {**QUIET, "user": 0.9, "other": 0.9}
    traces = [traced(record, interrupts, run_cores=0.98)]
    found = disturbance(record, traces)
    assert found.others_percent == pytest.approx(1.0)
    assert not found.is_load
    assert busy_percent(record, traces) == pytest.approx(46.0)


def test_trials_that_were_measured_again_are_counted_apart() -> None:
    quiet, loaded = (
        Disturbance(others_percent=percent, stolen_percent=0.0) for percent in (1.0, 20.0)
    )
    found = {"a": loaded, "b": loaded, "c": quiet, "a.again": loaded, "b.again": quiet}
    load = load_of_run(found, {"a.again", "b.again"})
    assert (load.trials, load.beside_others, load.measured_again) == (3, 2, 2)
    assert load_words(load) == (
        "while other processes took 20 % of the cores "
        "(2 of 3 trials; 2 were measured again, 1 of them beside other work, too)"
    )
