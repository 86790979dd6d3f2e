"""Ranks of a trial on this host, found by the status files that they write."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path

from paceline.errors import DataError
from paceline.host.processes import Process
from paceline.records.files import read_json, typed
from paceline.records.layout import TrialFiles
from paceline.records.rows import RankStatus

_log = logging.getLogger("paceline.sidecar")


class RankFinder:
    """Reads a status file again only after it has changed."""

    def __init__(self, trial_root: Path, host: str) -> None:
        self.files = TrialFiles(trial_root)
        self._host = host
        self._folder = str(self.files.rank(0).root.parent)
        self._known: dict[int, tuple[tuple[int, int], RankStatus]] = {}
        self._warned: set[int] = set()

    def statuses(self) -> dict[int, RankStatus]:
        """Return the last readable status of each rank on this host."""
        for rank in self._ranks():
            self._look_at(rank)
        statuses = {rank: status for rank, (_, status) in sorted(self._known.items())}
        return {rank: it for rank, it in statuses.items() if it.host == self._host}

    def _ranks(self) -> list[int]:
        try:
            return [int(name) for name in os.listdir(self._folder) if name.isdigit()]  # noqa: PTH208
        except OSError:
            return []  # no rank has started yet

    def _look_at(self, rank: int) -> None:
        path = f"{self._folder}/{rank}/status.json"
        try:
            found = os.stat(path)  # noqa: PTH116  (every second, for each rank)
            version = (found.st_ino, found.st_mtime_ns)
            if rank not in self._known or self._known[rank][0] != version:
                status = typed(read_json(Path(path)), RankStatus, Path(path))
                self._known[rank] = (version, status)
        except FileNotFoundError:
            self._known.pop(rank, None)
        except (OSError, DataError) as error:
            if rank not in self._warned:
                _log.warning("rank %d: its last readable status is used: %s", rank, error)
            self._warned.add(rank)


def running_processes(statuses: Mapping[int, RankStatus]) -> dict[int, Process]:
    """Return the process of each running rank.

    A process that several ranks claim is left out: it is a Spark executor between two tasks.
    """
    running = {rank: status for rank, status in statuses.items() if status.state == "running"}
    claims = [status.pid for status in running.values()]
    return {
        rank: status.process
        for rank, status in running.items()
        if status.process is not None and claims.count(status.pid) == 1
    }
