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
_NOT_THERE = -1
_log = logging.getLogger("paceline.sidecar")


class RankFinder:
    """Which process each rank on this host is now, as far as the statuses can be believed."""

    def __init__(self, trial_root: Path, host: str) -> None:
        self.files = TrialFiles(trial_root)
        self._host = host
        self._folder = str(self.files.rank(0).root.parent)
        self._folder_ns = _NOT_THERE
        self._paths: dict[int, str] = {}
        self._warned: set[int] = set()
        self._known: dict[int, tuple[tuple[int, int], RankStatus]] = {}

    def has_new_ranks(self) -> bool:
        """Whether ranks may have come since the last look, or one has not told of itself yet."""
        return self._version_ns() != self._folder_ns or len(self._known) < len(self._paths)

    def statuses(self) -> dict[int, RankStatus]:
        """By rank; those of other hosts, or that could not be read yet, are left out."""
        self._find_paths()
        found = {}
        for rank, path in self._paths.items():
            status = self._status(rank, path)
            if status is not None and status.host == self._host:
                found[rank] = status
        return found

    def _version_ns(self) -> int:
        # Plain strings: with many ranks, pathlib would be most of the cost of a look.
        try:
            return os.stat(self._folder).st_mtime_ns  # noqa: PTH116
        except OSError:
            return _NOT_THERE  # yet

    def _find_paths(self) -> None:
        version_ns = self._version_ns()
        if version_ns in (_NOT_THERE, self._folder_ns):
            return
        try:
            self._paths = {rank: str(files.status) for rank, files in self.files.ranks()}
        except OSError:
            return  # removed meanwhile
        # The clock of files ticks in milliseconds: another rank may come in the same tick.
        is_settled = time.time_ns() - version_ns > _SETTLED_AFTER_NS
        self._folder_ns = version_ns if is_settled else _NOT_THERE

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
