"""The remote place through which nodes without shared storage exchange the files of an attempt.

    URL/nodes/replay/…                     states of the baseline, which trials replay
    URL/nodes/ATTEMPT/trial/…              trial.json, and the file of a task
    URL/nodes/ATTEMPT/hosts/HOST/          made by a node at its start: it will deliver its records
    URL/nodes/ATTEMPT/hosts/HOST/files/…   the node's folder of the trial
    URL/nodes/ATTEMPT/hosts/HOST/done/     made when all of them are there

URL is the place of the whole run's copy, whose end removes `nodes`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from paceline.collectives.host import Process
from paceline.train.data.remote_folder import url_below

_VARIABLE = "PACELINE_PLACE"


@dataclass(frozen=True, slots=True, kw_only=True)
class RemotePlace:
    """The place of one attempt at a trial."""

    url: str  # of the run
    attempt: str  # a name that no other attempt has

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> RemotePlace | None:
        text = environment.get(_VARIABLE)
        if text is None:
            return None
        attempt, _, url = text.partition(" ")
        return cls(url=url, attempt=attempt)

    def environment(self) -> dict[str, str]:
        """Return the variable from which the job side reads this back."""
        # Without quotes, which the shell scripts of YARN do not escape.
        return {_VARIABLE: f"{self.attempt} {self.url}"}

    @property
    def replay(self) -> str:
        return url_below(self.url, "nodes", "replay")

    @property
    def trial(self) -> str:
        return url_below(self.url, "nodes", self.attempt, "trial")

    @property
    def hosts(self) -> str:
        return url_below(self.url, "nodes", self.attempt, "hosts")

    def host(self, name: str, *folders: str) -> str:
        return url_below(self.hosts, name, *folders)


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """The work of the process that delivers the records of a node."""

    place: RemotePlace
    host: str
    folder: str  # of this node, removed when its records are sent
    trial_root: str  # in the folder
    ranks: int  # of this node
    first_rank: Process
    limit_s: float  # until the ranks have ended

    @property
    def log(self) -> Path:
        return Path(self.folder, "delivery.log")
