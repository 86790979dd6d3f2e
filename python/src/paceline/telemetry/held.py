"""What is costly is read on few ticks; who asks in between is told what was read last."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.records.rows import RankSample
    from paceline.telemetry.ticks import HostTick, WatchTick


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
