"""Beats, and shares of the CPUs between the rows of a watch."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from paceline.telemetry.cadence import HostShares, beats_between, next_beat
from paceline.telemetry.host import HostReader, HostReading


@pytest.mark.parametrize(
    ("after_s", "interval_s", "beat_s"),
    [
        (10.0, 1.0, 11.0),
        (10.4, 1.0, 11.0),
        (10.999, 1.0, 11.0),
        (0.3, 0.1, 0.4),  # 0.3 / 0.1 is a little less than 3
        (123456.7, 0.1, 123456.8),
        (13.0, 10.0, 20.0),
        (14.6, 0.25, 14.75),
    ],
)
def test_beats_are_multiples_of_the_interval(
    after_s: float, interval_s: float, beat_s: float
) -> None:
    assert next_beat(after_s, interval_s) == pytest.approx(beat_s, abs=1e-9)


@pytest.mark.parametrize(
    ("last_s", "now_s", "missed"),
    [
        (10.0, 11.0, 0),
        (10.02, 11.3, 0),  # late, but within its beat
        (10.0, 12.0, 1),
        (10.0, 14.9, 3),
        (10.0, 10.4, 0),  # a watch that begins between beats
        (10.6, 11.0, 0),
        (10.6, 12.0, 1),
    ],
)
def test_beats_that_passed_between_ticks_are_missed(
    last_s: float, now_s: float, missed: int
) -> None:
    assert beats_between(last_s, now_s, 1.0) == missed


def reading(**changes: Any) -> HostReading:
    return dataclasses.replace(HostReader().read(), **changes)


def at(user_s: float, idle_s: float, iowait_s: float = 0.0, *, valid: bool = True) -> HostReading:
    return reading(
        cpu_seconds={
            "user": user_s,
            "system": 0.0,
            "idle": idle_s,
            "iowait": iowait_s,
            "steal": 0.0,
            "other": 0.0,
        },
        core_busy_s=[user_s, 0.0],
        cpu_user_percent=99.0,  # since the tick before, whoever's it was
        cpu_iowait_percent=1.0,
        core_busy_percent=[98.0, 1.0],
        iowait_valid=valid,
    )


def test_first_row_has_no_shares() -> None:
    fields = HostShares().take(at(5, 5))
    assert fields["cpu_user_percent"] is None
    assert fields["core_busy_percent"] == []
    assert fields["cpu_seconds"]["user"] == 5


def test_shares_stay_as_read_where_no_tick_was_passed_over() -> None:
    shares = HostShares()
    shares.take(at(5, 5))
    assert shares.take(at(6, 8))["cpu_user_percent"] == 99.0


def test_shares_are_since_the_watchs_own_last_row() -> None:
    shares = HostShares()
    shares.take(at(5, 5))
    shares.pass_over(at(6, 6, valid=False))
    fields = shares.take(at(6.5, 8, 0.5))  # 5 s of two cores
    assert fields["cpu_user_percent"] == 30.0
    assert fields["cpu_idle_percent"] == 60.0
    assert fields["cpu_iowait_percent"] == 10.0
    assert fields["core_busy_percent"] == [60.0, 0.0]  # 1.5 s of the 2.5 s of each core
    assert fields["iowait_valid"] is False
    shares.pass_over(at(7, 8, 0.5))
    fields = shares.take(at(7.5, 9.0, 0.5))
    assert (fields["cpu_user_percent"], fields["iowait_valid"]) == (50.0, True)


def test_no_time_between_rows_is_no_share() -> None:
    shares = HostShares()
    shares.take(at(5, 5))
    shares.pass_over(at(5, 5))
    fields = shares.take(at(5, 5))
    assert (fields["cpu_user_percent"], fields["core_busy_percent"]) == (None, [])


def test_iowait_that_means_nothing_has_no_share() -> None:
    shares = HostShares()
    shares.take(at(5, 5))
    shares.pass_over(at(6, 6))
    last = dataclasses.replace(at(7, 7), cpu_iowait_percent=None)
    assert shares.take(last)["cpu_iowait_percent"] is None
