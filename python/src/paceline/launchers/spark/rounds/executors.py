"""Spark's executors as a trial in rounds knows them: which ranks were in one that is lost.

Spark itself would go on with the executors that are left, where the ranks then share cores: no
longer the trial that was asked for.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.errors import RankFailed
from paceline.host.processes import command_line_of, parent_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from paceline.launchers.spark.rounds.exchange import RankReport

# Of CoarseGrainedExecutorBackend, under every cluster manager.
_ID_OPTION = "--executor-id"


def own_executor() -> str | None:
    """Spark's name for the executor whose task this process runs; None with a local master."""
    executor = parent_of(os.getppid())  # above the daemon that forks Python workers
    words = [] if executor is None else command_line_of(executor)
    return words[words.index(_ID_OPTION) + 1] if _ID_OPTION in words[:-1] else None


@dataclass(frozen=True, slots=True)
class Place:
    """An executor that took tasks: where it is, and which ranks it was."""

    host: str
    ranks: tuple[int, ...]


class Executors:
    """Those that took tasks of a trial."""

    def __init__(self, alive: Callable[[], Collection[str]] | None = None) -> None:
        """alive: the executors that Spark has; None with a local master, which is its own."""
        self._alive = alive
        self._seen: dict[str, Place] = {}

    def saw(self, reports: Mapping[int, RankReport]) -> None:
        """Where the tasks of a round were; one that took none of them stays as it was."""
        ranks: dict[str, list[int]] = {}
        hosts: dict[str, str] = {}
        for rank, told in sorted(reports.items()):
            if told.executor is not None:
                ranks.setdefault(told.executor, []).append(rank)
                hosts[told.executor] = told.host
        self._seen |= {name: Place(hosts[name], tuple(those)) for name, those in ranks.items()}

    def place(self, name: str) -> Place | None:
        """None for one that no task has told of yet."""
        return self._seen.get(name)

    def check(self) -> None:
        """Raise RankFailed if one of them is lost."""
        if self._alive is None or not self._seen:
            return
        alive = self._alive()
        for name, place in self._seen.items():
            if name not in alive:
                why = "it was killed or crashed, or its host cannot be reached any more"
                raise RankFailed(lost_words(name, place.host, place.ranks, why), place.ranks[0])


def lost_words(name: str, host: str, ranks: Sequence[int], why: str) -> str:
    """What there is to say of a lost executor."""
    which = "rank" if len(ranks) == 1 else "ranks"
    listed = ", ".join(map(str, ranks))
    return f"Spark lost executor {name} on host {host}, and {which} {listed} with it: {why}"
