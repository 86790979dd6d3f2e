"""CPU times from texts of /proc/stat with exact numbers."""

from __future__ import annotations

import pytest

from paceline.telemetry.cpu import (
    CoreSeconds,
    CoreShares,
    CpuSeconds,
    CpuShares,
    parse_counters,
)

#            user nice system idle iowait irq softirq steal guest guest_nice
STAT = b"""cpu  1000 30 500 8000 400 7 3 60 200 10
cpu0 600 20 300 4000 100 4 2 30 200 10
cpu1 400 10 200 4000 300 3 1 30 0 0
intr 99 1 2 3
ctxt 5
"""
READING = CpuSeconds(user=100.0, system=50.0, idle=800.0, iowait=40.0, steal=6.0, other=4.0)


def later(**seconds: float) -> CpuSeconds:
    """READING with states that have gone on by so many seconds."""
    return CpuSeconds(**{k: v + seconds.get(k, 0.0) for k, v in READING._asdict().items()})


def test_states_are_disjoint_and_guests_count_once() -> None:
    counters = parse_counters(STAT, ticks_per_s=100)
    assert counters is not None
    # the last: nice, with the guests' in it, 30; interrupts 7 and 3; guests 200
    assert counters.cpu == pytest.approx((8.0, 5.0, 80.0, 4.0, 0.6, 2.4))
    assert sum(counters.cpu) == pytest.approx((1000 + 30 + 500 + 8000 + 400 + 7 + 3 + 60) / 100)
    assert counters.has_iowait


def test_core_is_busy_when_it_neither_idles_nor_waits_nor_is_stolen() -> None:
    counters = parse_counters(STAT, ticks_per_s=100)
    assert counters is not None
    assert [core.busy for core in counters.cores] == pytest.approx([9.26, 6.14])
    assert [core.total for core in counters.cores] == pytest.approx([50.56, 49.44])


def test_core_that_is_off_keeps_its_place() -> None:
    counters = parse_counters(b"cpu  2 0 0 2 0\ncpu0 1 0 0 1 0\ncpu2 1 0 0 1 0\n", ticks_per_s=1)
    assert counters is not None
    assert counters.cores == ((1.0, 2.0), (0.0, 0.0), (1.0, 2.0))


@pytest.mark.parametrize("line", [b"cpu  5 0 3 9\n", b"cpu  0 0 0 0 0 0 0 0 0 0\n"])
def test_iowait_means_nothing_where_it_is_not_counted(line: bytes) -> None:
    counters = parse_counters(line, ticks_per_s=100)
    assert counters is not None
    assert not counters.has_iowait


def test_text_without_cpus_is_none() -> None:
    assert parse_counters(b"") is None


def test_first_reading_has_no_shares() -> None:
    assert CpuShares().step(READING) == (None, True)


def test_shares_are_percent_of_all_cores_since_the_last_reading() -> None:
    shares = CpuShares()
    shares.step(READING)
    # 2 cores for one second: 2 s of CPU time
    told, forwards = shares.step(
        later(user=1.0, system=0.3, idle=0.4, iowait=0.2, steal=0.06, other=0.04)
    )
    assert told == pytest.approx((50.0, 15.0, 20.0, 10.0, 3.0, 2.0))
    assert forwards
    assert shares.total_seconds == pytest.approx((101.0, 50.3, 800.4, 40.2, 6.06, 4.04))


def test_iowait_that_runs_backwards_counts_as_zero_and_is_marked() -> None:
    shares = CpuShares()
    shares.step(READING)
    told, forwards = shares.step(later(user=1.0, idle=1.0, iowait=-3.0))
    assert told == pytest.approx((50.0, 0.0, 50.0, 0.0, 0.0, 0.0))
    assert not forwards
    assert shares.total_seconds.iowait == 40.0
    told, forwards = shares.step(later(user=1.5, idle=2.4, iowait=-2.9))  # 0.5 + 1.4 + 0.1 s
    assert told is not None
    assert told.iowait == pytest.approx(5.0)
    assert forwards
    assert shares.total_seconds.iowait == pytest.approx(40.1)


def test_counters_that_stand_still_give_no_shares() -> None:
    shares = CpuShares()
    shares.step(READING)
    assert shares.step(READING) == (None, True)


def test_share_of_a_core_is_of_its_own_time() -> None:
    cores = CoreShares()
    assert cores.step((CoreSeconds(5.0, 10.0), CoreSeconds(1.0, 10.0))) == ()
    assert cores.step((CoreSeconds(5.75, 11.0), CoreSeconds(1.0, 11.0))) == (75.0, 0.0)
    assert cores.busy_seconds == (5.75, 1.0)


def test_busy_time_of_a_core_never_runs_backwards() -> None:
    cores = CoreShares()
    cores.step((CoreSeconds(5.0, 10.0),))
    assert cores.step((CoreSeconds(0.0, 0.0),)) == (0.0,)  # switched off
    assert cores.busy_seconds == (5.0,)
    assert cores.step((CoreSeconds(0.5, 1.0),)) == (50.0,)
    assert cores.busy_seconds == (5.5,)


def test_core_whose_idle_time_was_corrected_is_not_busier_than_busy() -> None:
    cores = CoreShares()
    cores.step((CoreSeconds(5.0, 10.0),))
    assert cores.step((CoreSeconds(5.5, 10.4),)) == (100.0,)


def test_another_number_of_cores_starts_anew() -> None:
    cores = CoreShares()
    cores.step((CoreSeconds(5.0, 10.0),))
    assert cores.step((CoreSeconds(6.0, 11.0), CoreSeconds(0.1, 0.2))) == ()
    assert cores.busy_seconds == (6.0, 0.1)
