"""What stays as last read: what is costly, between the few ticks that read it; and what processes
held, once they have ended."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from paceline.records.rows import HostSample, RankSample
    from paceline.telemetry.ticks import HostTick, WatchTick


_Row = TypeVar("_Row")


@dataclass(slots=True)
class LastAlive(Generic[_Row]):
    """The last rows of a run or a rank in which any process lived, and had its memory."""

    row: _Row | None = None
    costly: _Row | None = None  # that has what is costly

    def note(self, row: _Row, *, deep: bool) -> None:
        """`row` is one; deep: and has what is costly."""
        self.row = row
        if deep:
            self.costly = row


def run_outlived(sample: HostSample, last: LastAlive[HostSample]) -> HostSample:
    """`sample` with memory, threads and open files as they were while any process lived; counters,
    and how many processes there are, as they are now."""
    if last.row is None:
        return sample
    return dataclasses.replace(
        sample,
        run_rss_bytes=last.row.run_rss_bytes,
        run_threads=last.row.run_threads,
        run_pss_bytes=last.costly.run_pss_bytes if last.costly else None,
        run_open_files=last.costly.run_open_files if last.costly else None,
    )


def rank_outlived(sample: RankSample, last: LastAlive[RankSample]) -> RankSample:
    """As run_outlived, of one rank."""
    if last.row is None:
        return sample
    return dataclasses.replace(
        sample,
        rss_bytes=last.row.rss_bytes,
        threads=last.row.threads,
        pss_bytes=last.costly.pss_bytes if last.costly else None,
        open_files=last.costly.open_files if last.costly else None,
    )


def is_costly(tick: HostTick) -> bool:
    """Whether what is costly was read in this tick, of any run."""
    return any(
        watch.sample.run_open_files is not None
        or any(rank.open_files is not None or rank.pss_bytes is not None for rank in watch.ranks)
        for watch in tick.watches
    )


def carried(last: HostTick, tick: HostTick) -> HostTick:
    """`tick`, with what it did not read as `last` had it: proportional memory and open files of
    each run and rank."""
    before = {(watch.run, watch.launched_unix_s): watch for watch in last.watches}
    watches = tuple(
        _carried_watch(before.get((watch.run, watch.launched_unix_s)), watch)
        for watch in tick.watches
    )
    return dataclasses.replace(tick, watches=watches)


def _carried_watch(last: WatchTick | None, watch: WatchTick) -> WatchTick:
    if last is None:
        return watch
    sample = dataclasses.replace(
        watch.sample,
        run_pss_bytes=_first(watch.sample.run_pss_bytes, last.sample.run_pss_bytes),
        run_open_files=_first(watch.sample.run_open_files, last.sample.run_open_files),
    )
    by_rank = {rank.rank: rank for rank in last.ranks}
    ranks = tuple(_carried_rank(by_rank.get(rank.rank), rank) for rank in watch.ranks)
    return dataclasses.replace(watch, sample=sample, ranks=ranks)


def _carried_rank(last: RankSample | None, rank: RankSample) -> RankSample:
    if last is None or last.pid != rank.pid:
        return rank
    return dataclasses.replace(
        rank,
        pss_bytes=_first(rank.pss_bytes, last.pss_bytes),
        open_files=_first(rank.open_files, last.open_files),
    )


def _first(value: int | None, last: int | None) -> int | None:
    return last if value is None else value
