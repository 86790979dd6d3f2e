"""Costly figures stay as last read, of the same trial and the same process; and what processes
held, as they held it last."""

from __future__ import annotations

import dataclasses

from tests.unit.telemetry.full_tick import RANK, TICK

from paceline.records.rows import HostSample, RankSample
from paceline.telemetry.held import LastAlive, carried, rank_outlived, run_outlived
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


def held_by(sample: HostSample) -> list[int | None]:
    return [
        sample.run_rss_bytes, sample.run_threads, sample.run_pss_bytes, sample.run_open_files,
    ]  # fmt: skip


def test_run_that_has_ended_has_what_it_held_last_and_counts_to_the_end() -> None:
    (watch,) = TICK.watches
    last: LastAlive[HostSample] = LastAlive()
    last.note(watch.sample, deep=True)
    later = dataclasses.replace(
        watch.sample, run_rss_bytes=7, run_threads=5, run_pss_bytes=None, run_open_files=None
    )
    last.note(later, deep=False)
    gone = dataclasses.replace(
        watch.sample, run_processes=0, run_rss_bytes=0, run_threads=0, run_pss_bytes=0,
        run_open_files=0, run_cpu_seconds=99.0,
    )  # fmt: skip
    told = run_outlived(gone, last)
    assert held_by(told) == [7, 5, 112, 135]
    assert (told.run_processes, told.run_cpu_seconds) == (0, 99.0)


def test_what_was_never_read_while_a_run_lived_is_not_told() -> None:
    last: LastAlive[HostSample] = LastAlive()
    last.note(TICK.watches[0].sample, deep=False)
    gone = dataclasses.replace(TICK.watches[0].sample, run_pss_bytes=0, run_open_files=0)
    assert held_by(run_outlived(gone, last))[2:] == [None, None]


def test_host_without_a_run_is_told_as_it_is() -> None:
    sample, nothing = TICK.watches[0].sample, LastAlive[HostSample]()
    assert run_outlived(sample, nothing) == sample
    assert rank_outlived(RANK, LastAlive[RankSample]()) == RANK
