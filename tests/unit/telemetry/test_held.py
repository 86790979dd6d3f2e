"""Costly figures stay as last read, of the same trial and the same process."""

from __future__ import annotations

import dataclasses

from tests.unit.telemetry.full_tick import RANK, TICK

from paceline.records.rows import RankSample
from paceline.telemetry.held import carried
from paceline.telemetry.ticks import HostTick, WatchTick


def shallow(tick: HostTick, launched_unix_s: float | None = None, pid: int = RANK.pid) -> HostTick:
    """The tick after: what is costly was not read."""
    (watch,) = tick.watches
    sample = dataclasses.replace(watch.sample, run_pss_bytes=None, run_open_files=None)
    rank = dataclasses.replace(RANK, pid=pid, pss_bytes=None, open_files=None)
    later = dataclasses.replace(
        watch,
        sample=sample,
        ranks=(rank,),
        launched_unix_s=launched_unix_s or watch.launched_unix_s,
    )
    return dataclasses.replace(tick, watches=(later,))


def seldom_read(watch: WatchTick) -> list[int | None]:
    ranks: list[RankSample] = list(watch.ranks)
    values = [watch.sample.run_pss_bytes, watch.sample.run_open_files]
    return values + [value for rank in ranks for value in (rank.pss_bytes, rank.open_files)]


def test_costly_figures_stay_as_last_read() -> None:
    later = carried(carried(TICK, shallow(TICK)), shallow(TICK))
    assert seldom_read(later.watches[0]) == [112, 135, 204, 210]


def test_costly_figures_of_another_trial_are_not_taken_over() -> None:
    later = carried(TICK, shallow(TICK, launched_unix_s=1700000001.0))
    assert seldom_read(later.watches[0]) == [None, None, None, None]


def test_costly_figures_of_another_process_are_not_taken_over() -> None:
    later = carried(TICK, shallow(TICK, pid=1))
    assert seldom_read(later.watches[0]) == [112, 135, None, None]
