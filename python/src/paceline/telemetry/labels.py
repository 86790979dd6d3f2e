"""The label `run` of the runs that a host's sampler watches: never one for two of them.

It is the run's name, to which a part of the digest of its directory is added where another run of
that name is watched already. A label holds as long as the run is watched.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from paceline.telemetry.watches import WatchRequest

_DIGITS = 6


class RunLabels:
    """Labels by run directory. known: those that a sampler which died had given."""

    def __init__(self, known: Mapping[str, str]) -> None:
        self._by_directory = dict(known)

    @property
    def known(self) -> dict[str, str]:
        return dict(self._by_directory)

    def label_of(self, request: WatchRequest) -> str:
        """The same for all watches of a run, whatever its others came to."""
        label = self._by_directory.get(request.directory)
        if label is None:
            label = request.run
            if label in self._by_directory.values():
                digest = hashlib.sha256(request.directory.encode()).hexdigest()
                label = f"{label}-{digest[:_DIGITS]}"
            self._by_directory[request.directory] = label
        return label

    def keep(self, requests: Iterable[WatchRequest]) -> None:
        """Forget the runs of which none of these is a watch."""
        watched = {request.directory for request in requests}
        self._by_directory = {
            directory: label
            for directory, label in self._by_directory.items()
            if directory in watched
        }
