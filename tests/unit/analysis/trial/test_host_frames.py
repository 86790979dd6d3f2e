"""Shares, rates and gaps follow from the counters of a trace."""

from __future__ import annotations

from typing import Any

import polars as pl
import pytest

from paceline.analysis.trial.host_frames import gaps, host_frame, rank_frame
from paceline.analysis.trial.reading import HostTrace

BASE = {
    "ram_used_bytes": 4, "ram_total_bytes": 16, "run_cpu_seconds": 0.0,
    "run_voluntary_context_switches": None, "run_involuntary_context_switches": None,
}  # fmt: skip
COUNTERS = {name: pl.Int64() for name, value in BASE.items() if value is None}


def trace(*rows: dict[str, Any], interval_s: float | None = None) -> HostTrace:
    samples = pl.DataFrame(
        [{**BASE, **row} for row in rows], schema_overrides=COUNTERS, infer_schema_length=None
    )
    header = {} if interval_s is None else {"interval_s": interval_s}
    return HostTrace(host="a", header=header, samples=samples)


def rates(*points: tuple[float, int]) -> list[Any]:
    rows = (
        {"unix_s": unix_s, "disks": {"a": {"read_bytes": value}, "b": {"read_bytes": 5}}}
        for unix_s, value in points
    )
    return host_frame(trace(*rows))["disk_read_bytes_per_s"].to_list()


def seldom(*points: tuple[float, int | None]) -> list[Any]:
    counter = "run_voluntary_context_switches"
    rows = ({"unix_s": unix_s, counter: value} for unix_s, value in points)
    return host_frame(trace(*rows))[f"{counter}_per_s"].to_list()


def cpu(unix_s: float, **seconds: float) -> dict[str, Any]:
    return {"unix_s": unix_s, "cpu_seconds": seconds}


def test_rate_is_the_increase_over_the_time_since_the_previous_sample() -> None:
    assert rates((10.0, 100), (12.0, 140), (12.5, 140)) == [None, 20.0, 0.0]


def test_counter_that_was_restarted_has_no_rate_there() -> None:
    assert rates((0.0, 50), (1.0, 10), (2.0, 14)) == [None, None, 4.0]


def test_interval_that_is_too_short_has_no_rate() -> None:
    assert rates((0.0, 0), (1.0, 10), (1.001, 11), (2.0, 20))[:3] == [None, 10.0, None]


def test_counter_that_is_seldom_read_has_rates_from_reading_to_reading() -> None:
    points = ((0.0, 5), (1.0, None), (2.0, None), (3.0, 35), (4.0, None))
    assert seldom(*points) == [None, None, None, 10.0, None]


def test_cpu_shares_are_increases_over_the_increase_of_all_states() -> None:
    frame = host_frame(
        trace(
            cpu(0.0, user=10.0, system=5.0, idle=100.0, iowait=1.0, steal=0.0, other=0.0),
            cpu(1.0, user=11.0, system=5.25, idle=100.5, iowait=1.0, steal=0.25, other=0.0),
        )
    )
    assert frame["cpu_busy_percent"].to_list() == [None, 62.5]
    assert frame["cpu_idle_percent"].to_list() == [None, 25.0]
    assert frame["cpu_iowait_percent"].to_list() == [None, 0.0]
    assert frame["cpu_steal_percent"].to_list() == [None, 12.5]


def test_iowait_counter_that_ran_backwards_has_no_share() -> None:
    frame = host_frame(
        trace(
            cpu(0.0, user=1.0, idle=1.0, iowait=5.0),
            cpu(1.0, user=2.0, idle=2.0, iowait=4.5),
            cpu(2.0, user=3.0, idle=2.5, iowait=5.0),
        )
    )
    assert frame["cpu_iowait_percent"].to_list() == [None, None, 25.0]
    assert frame["cpu_idle_percent"].to_list() == [None, 50.0, 25.0]


def test_cores_ram_and_run_have_shares() -> None:
    rows = (
        {"unix_s": float(n), "core_busy_s": [n * 0.5, 0.0], "run_cpu_seconds": 1.5 * n}
        for n in range(2)
    )
    frame = host_frame(trace(*rows))
    assert frame["core_busy_percent"].to_list()[1] == [50.0, 0.0]
    assert frame["run_cpu_percent"].to_list() == [None, 150.0]
    assert frame["ram_percent"].to_list() == [25.0, 25.0]


def test_pressure_is_a_share_of_the_time() -> None:
    rows = ({"unix_s": float(n), "pressure": {"io": {"some_s": 0.3 * n}}} for n in range(2))
    assert host_frame(trace(*rows))["pressure_io_percent"].to_list() == [None, pytest.approx(30)]


def test_each_rank_has_its_own_rate() -> None:
    ranks = pl.DataFrame(
        {"unix_s": [0.0, 0.0, 1.0, 1.0], "rank": [0, 1, 0, 1], "cpu_seconds": [0.0, 5.0, 0.5, 6.0]}
    )
    assert rank_frame(ranks)["cpu_percent"].to_list() == [None, None, 50.0, 100.0]


def test_distance_of_more_than_two_and_a_half_intervals_is_a_gap() -> None:
    rows = [{"unix_s": t} for t in (0.0, 1.0, 3.5, 6.01, 7.0)]
    assert gaps(trace(*rows, interval_s=1.0)) == [(3.5, 6.01)]
    assert gaps(trace(*rows)) == []
