"""The ranks of a trial on one host, by the status files that they write."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

from paceline.errors import DataError
from paceline.records.files import read_json
from paceline.records.layout import TrialFiles
from paceline.records.rows import RankStatus
from paceline.records.typed import typed

_SETTLED_AFTER_NS = 100_000_000
_log = logging.getLogger("paceline.sidecar")


class RankFinder:
    """Which process each rank on this host is now, as far as the statuses can be believed."""

    def __init__(self, trial_root: Path, host: str) -> None:
        self.files = TrialFiles(trial_root)
        self._host = host
        self._folder = str(self.files.rank(0).root.parent)
        self._folder_ns = -1
        self._paths: dict[int, str] = {}
        self._warned: set[int] = set()
        self._known: dict[int, tuple[tuple[int, int], RankStatus]] = {}

    def statuses(self) -> dict[int, RankStatus]:
        """By rank; those of other hosts, or that could not be read yet, are left out."""
        self._find_paths()
        found = {}
        for rank, path in self._paths.items():
            status = self._status(rank, path)
            if status is not None and status.host == self._host:
                found[rank] = status
        return found

    def _find_paths(self) -> None:
        # Plain strings: with many ranks, pathlib would be most of the cost of a look.
        try:
            version_ns = os.stat(self._folder).st_mtime_ns  # noqa: PTH116
            if version_ns != self._folder_ns:
                paths = {rank: str(files.status) for rank, files in self.files.ranks()}
                self._paths = paths
                # The clock of files ticks in milliseconds: another rank may come in the same tick.
                is_settled = time.time_ns() - version_ns > _SETTLED_AFTER_NS
                self._folder_ns = version_ns if is_settled else -1
        except OSError:
            return  # none there yet

    def _status(self, rank: int, path: str) -> RankStatus | None:
        try:
            about = os.stat(path)  # noqa: PTH116
            version = (about.st_ino, about.st_mtime_ns)
            if rank not in self._known or self._known[rank][0] != version:
                status = typed(read_json(Path(path)), RankStatus, Path(path))
                self._known[rank] = (version, status)
        except FileNotFoundError:
            self._known.pop(rank, None)
        except (OSError, DataError) as error:
            self._warn(rank, error)
        known = self._known.get(rank)
        return None if known is None else known[1]

    def _warn(self, rank: int, error: Exception) -> None:
        if rank not in self._warned:
            _log.warning("rank %d: its status stays as it was: %s", rank, error)
        self._warned.add(rank)
