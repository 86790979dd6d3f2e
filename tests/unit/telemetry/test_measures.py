"""Rows become the catalogue's metrics: exact values, nothing made up, nothing left out."""

from __future__ import annotations

import dataclasses

import pytest
from tests.unit.telemetry.full_tick import (
    EXPECTED,
    FACTS,
    HOST,
    PROGRESS,
    RANK,
    RUN,
    SAMPLE,
    TICK,
    WATCH,
    key,
)

from paceline.records.rows import CgroupSample, HostSample
from paceline.telemetry.catalogue import CATALOGUE
from paceline.telemetry.measures import (
    Measure,
    host_tick_values,
    host_values,
    rank_values,
    run_values,
    series,
    training_values,
    watch_values,
)
from paceline.telemetry.ticks import TrainingProgress


def told(measures: list[Measure]) -> dict[str, float]:
    """Values by series, without the two series that only have labels."""
    samples = [sample for measure in measures for sample in series(measure)]
    keys = [key(sample.name, sample.labels) for sample in samples]
    assert len(keys) == len(set(keys))
    return {
        at: sample.value
        for at, sample in zip(keys, samples, strict=True)
        if not sample.name.endswith("_info")
    }


def names(measures: list[Measure]) -> set[str]:
    return {measure.metric.name for measure in measures}


def test_full_tick_tells_each_value_under_its_name() -> None:
    assert told(list(host_tick_values(HOST, TICK, "1.2"))) == EXPECTED


def test_full_tick_uses_each_metric_of_the_catalogue() -> None:
    assert names(list(host_tick_values(HOST, TICK, "1.2"))) == set(CATALOGUE)


def test_facts_of_a_run_stand_in_its_info() -> None:
    (info,) = [m for m in watch_values(HOST, WATCH) if m.metric.kind == "info"]
    (sample,) = series(info)
    assert sample == ("paceline_run_info", {"host": HOST, "run": RUN, **FACTS}, 1)


def test_version_of_the_sidecar_stands_in_its_info() -> None:
    measures = list(host_tick_values(HOST, TICK, "1.2"))
    (info,) = [m for m in measures if m.metric.name == "paceline_sidecar"]
    assert list(series(info)) == [("paceline_sidecar_info", {"host": HOST, "version": "1.2"}, 1)]


def test_facts_that_are_not_known_are_empty() -> None:
    watch = dataclasses.replace(WATCH, facts={"workload": "tiny"})
    (info,) = [m for m in watch_values(HOST, watch) if m.metric.kind == "info"]
    (sample,) = series(info)
    assert sample.labels == {"host": HOST, "run": RUN} | dict.fromkeys(FACTS, "") | {
        "workload": "tiny"
    }


def without_what_has_a_default(sample: HostSample) -> HostSample:
    """As versions before 0.1 wrote it."""
    required = {
        field.name: getattr(sample, field.name)
        for field in dataclasses.fields(HostSample)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    }
    return HostSample(**required)


def test_row_of_an_old_trace_tells_what_it_has() -> None:
    old = without_what_has_a_default(SAMPLE)
    assert names(list(host_values(HOST, old))) == {
        "paceline_host_iowait_valid",
        "paceline_host_memory_used_bytes",
        "paceline_host_memory_size_bytes",
        "paceline_host_swap_used_bytes",
    }
    assert "paceline_run_read_bytes" not in names(list(run_values(HOST, RUN, old)))


def test_what_was_not_read_in_a_row_has_no_series() -> None:
    seldom = {"run_pss_bytes": None, "run_open_files": None}
    measures = list(run_values(HOST, RUN, dataclasses.replace(SAMPLE, **seldom)))
    left_out = names(list(run_values(HOST, RUN, SAMPLE))) - names(measures)
    assert left_out == {
        "paceline_run_proportional_memory_bytes",
        "paceline_run_open_files",
    }
    rank = dataclasses.replace(RANK, pss_bytes=None, read_bytes=None)
    left_out = names(list(rank_values(HOST, RUN, RANK))) - names(list(rank_values(HOST, RUN, rank)))
    assert left_out == {"paceline_rank_proportional_memory_bytes", "paceline_rank_read_bytes"}


def test_rank_before_its_first_step_has_counters_at_zero_and_no_loss() -> None:
    values = told(list(training_values(HOST, RUN, TrainingProgress(rank=3))))
    assert values["paceline_training_steps_total{rank=3,run=quick}"] == 0
    assert values["paceline_training_step_seconds_count{rank=3,run=quick}"] == 0
    assert not any("loss" in name or "epoch" in name for name in values)


def test_before_the_first_step_the_run_counts_from_its_launch() -> None:
    watch = dataclasses.replace(WATCH, training=lambda: (TrainingProgress(rank=0),))
    values = told(list(watch_values(HOST, watch)))
    at = "paceline_run_last_step_timestamp_seconds{run=quick}"
    assert values[at] == WATCH.launched_unix_s


def test_last_step_of_a_run_is_that_of_its_last_rank() -> None:
    later = dataclasses.replace(PROGRESS, rank=1, last_step_ended_unix_s=1700000000.375)
    watch = dataclasses.replace(WATCH, training=lambda: (PROGRESS, later, TrainingProgress(rank=2)))
    values = told(list(watch_values(HOST, watch)))
    assert values["paceline_run_last_step_timestamp_seconds{run=quick}"] == 1700000000.375


def test_failed_rank_is_told() -> None:
    failed = dataclasses.replace(PROGRESS, failed=True)
    values = told(list(training_values(HOST, RUN, failed)))
    assert values["paceline_rank_failed{rank=0,run=quick}"] == 1


@pytest.mark.parametrize("newest_first", [True, False])
def test_of_two_watches_of_one_name_the_last_launched_is_told(newest_first: bool) -> None:
    newer = dataclasses.replace(
        WATCH,
        launched_unix_s=WATCH.launched_unix_s + 1,
        sample=dataclasses.replace(SAMPLE, run_processes=1),
    )
    watches = (newer, WATCH) if newest_first else (WATCH, newer)
    tick = dataclasses.replace(TICK, watches=watches)
    values = told(list(host_tick_values(HOST, tick, "1.2")))
    assert values["paceline_run_processes{run=quick}"] == 1
    assert values["paceline_sidecar_watches"] == 2


def test_control_group_is_that_of_the_run_launched_last() -> None:
    cgroup = CgroupSample(cpu_limit_cores=0.5)
    newer = dataclasses.replace(
        WATCH,
        run="other",
        launched_unix_s=WATCH.launched_unix_s + 1,
        sample=dataclasses.replace(SAMPLE, cgroup=cgroup),
    )
    tick = dataclasses.replace(TICK, watches=(newer, WATCH))
    values = told(list(host_tick_values(HOST, tick, "1.2")))
    assert values["paceline_cgroup_cpu_limit_cores"] == 0.5


def test_two_runs_at_once_are_told_apart() -> None:
    tick = dataclasses.replace(TICK, watches=(WATCH, dataclasses.replace(WATCH, run="other")))
    values = told(list(host_tick_values(HOST, tick, "1.2")))
    assert values["paceline_run_threads{run=quick}"] == 113
    assert values["paceline_run_threads{run=other}"] == 113
