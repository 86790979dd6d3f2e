"""Spark's executors during a trial in rounds: which ranks ran in an executor that was lost.

Spark itself would continue with the remaining executors, where the ranks then share cores. That
would be a different configuration.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.errors import RankFailed
from paceline.host.processes import command_line_of
from paceline.launchers.spark.barrier import executor_pid

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from paceline.rank.rounds.exchange import RankReport

# Option of CoarseGrainedExecutorBackend under every cluster manager.
_ID_OPTION = "--executor-id"


def own_executor() -> str | None:
    """Return Spark's name of this process's executor; None with a local master."""
    executor = executor_pid()
    words = [] if executor is None else command_line_of(executor)
    return words[words.index(_ID_OPTION) + 1] if _ID_OPTION in words[:-1] else None


@dataclass(frozen=True, slots=True)
class Place:
    """The host of an executor that ran tasks, and the ranks of those tasks."""

    host: str
    ranks: tuple[int, ...]


class Executors:
    """The executors that ran tasks of a trial."""

    def __init__(self, alive: Callable[[], Collection[str]] | None = None) -> None:
        """alive: returns the executors that Spark has; None with a local master."""
        self._alive = alive
        self._seen: dict[str, Place] = {}

    def saw(self, reports: Mapping[int, RankReport]) -> None:
        """Record where the tasks of a round ran; executors without a task keep their ranks."""
        ranks: dict[str, list[int]] = {}
        hosts: dict[str, str] = {}
        for rank, rank_report in sorted(reports.items()):
            if rank_report.executor is not None:
                ranks.setdefault(rank_report.executor, []).append(rank)
                hosts[rank_report.executor] = rank_report.host
        self._seen |= {name: Place(hosts[name], tuple(those)) for name, those in ranks.items()}

    def place(self, name: str) -> Place | None:
        """Return the place of an executor; None if it has not run a task yet."""
        return self._seen.get(name)

    def lost(self) -> RankFailed | None:
        """Return the error about an executor that Spark has lost; None if it has all of them."""
        if self._alive is None or not self._seen:
            return None
        alive = self._alive()
        for name, place in self._seen.items():
            if name not in alive:
                why = "it was killed or crashed, or its host cannot be reached any more"
                return lost_executor(name, place, why)
        return None


def lost_executor(name: str, place: Place, why: str) -> RankFailed:
    """Return the error about a lost executor; it names the executor's first rank."""
    which = "rank" if len(place.ranks) == 1 else "ranks"
    listed = ", ".join(map(str, place.ranks))
    return RankFailed(
        f"Spark lost executor {name} on host {place.host}, and {which} {listed} with it: {why}",
        place.ranks[0],
    )
