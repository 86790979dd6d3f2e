"""The assignment of ranks to Spark's tasks, without a server: by files that only one can create.

Spark decides which process runs which task, and may decide differently in every round. A process
that already holds a rank's samples should be that rank again. Therefore a task does not take the
rank of its partition but claims one: a file per round and rank, created by link(2), which fails if
the file exists, also on NFS, and shows the file with its content. File systems without links have
only exclusive creation: there the content comes a moment later.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from paceline.base.errors import EnvironmentLacks, RankFailed
from paceline.collectives.host import wait_until
from paceline.plan.trials.trial import Placement
from paceline.runner.launchers.spark.configuration import EXECUTORS_ADVICE, wrong_nodes

_DONE = "-done"
_NO_LINKS = (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP)  # link(2), and FUSE
_CONTENT_S = 5.0  # between the creation of a file and its content, without links


class Claims:
    """The claims of a trial, in a folder that all nodes share."""

    def __init__(self, folder: Path, placement: Placement) -> None:
        self._folder = folder
        self._placement = placement

    def node_of(self, host: str) -> int:
        """Return the index of a host among the trial's nodes, in the order of their first calls.

        Raises EnvironmentLacks if there are more hosts than the trial has nodes.
        """
        for index in range(self._placement.nodes):
            name = f"node-{index}"
            if self._make(name, host) or self._read(name) == host:
                return index
        hosts = [self._read(f"node-{index}") for index in range(self._placement.nodes)]
        raise wrong_nodes(self._placement.nodes, [*hosts, host])

    def take(self, number: int, partition: int, node: int, own: int | None) -> int:
        """Return the rank that a task of round `number` has from now on.

        own: the rank whose samples the process holds; it is preferred. Otherwise the task gets one
        of the node's ranks, and after the first round any.
        Raises EnvironmentLacks if Spark places more tasks on a node in the first round than the
        node has ranks, RankFailed if Spark runs a task of the round again.
        """
        again = self.rank_of(number, partition)
        if again is not None:
            raise RankFailed(
                f"rank {again}: Spark runs its task of round {number} a second time, whose steps "
                "are done and recorded; an executor was lost or its results were, look at Spark's "
                "own log",
                again,
            )
        for rank in self._candidates(number, node, own):
            if self._make(_name(number, rank), str(partition)):
                return rank
        raise EnvironmentLacks(
            f"expected at most {self._placement.ranks_per_node} rank(s) on a node, Spark placed "
            f"more on one; {EXECUTORS_ADVICE}"
        )

    def rank_of(self, number: int, partition: int) -> int | None:
        """Return the rank that a task of round `number` has claimed; None if it has none."""
        for rank in range(self._placement.ranks):
            if self._read(_name(number, rank)) == str(partition):
                return rank
        return None

    def finish(self, number: int, rank: int) -> None:
        """Record that a rank has done its part of a round."""
        self._make(_name(number, rank) + _DONE, "")

    def done(self, number: int) -> set[int]:
        """Return the ranks that have done their part of a round."""
        ranks = range(self._placement.ranks)
        return {r for r in ranks if (self._folder / (_name(number, r) + _DONE)).exists()}

    def forget(self, number: int) -> None:
        """Remove the claims of a round that has ended."""
        for rank in range(self._placement.ranks):
            for ending in ("", _DONE):
                (self._folder / (_name(number, rank) + ending)).unlink(missing_ok=True)

    def close(self) -> None:
        """Remove all claims."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _candidates(self, number: int, node: int, own: int | None) -> Iterator[int]:
        on_node = self._placement.ranks_per_node
        mine = range(node * on_node, (node + 1) * on_node)
        if own is not None:
            yield own
        yield from mine
        if number > 0:
            yield from (r for r in range(self._placement.ranks) if r not in mine)

    def _make(self, name: str, content: str) -> bool:
        """Create a file with that content; False if the name exists already."""
        self._folder.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=self._folder, prefix=".")
        try:
            with os.fdopen(descriptor, "w") as file:
                file.write(content)
            self._publish(Path(temporary), name)
        except FileExistsError:
            return False
        finally:
            Path(temporary).unlink()
        return True

    def _publish(self, file: Path, name: str) -> None:
        """Give the content a name. Raises FileExistsError if there is one."""
        try:
            os.link(file, self._folder / name)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            with (self._folder / name).open("x") as new:
                new.write(file.read_text())

    def _read(self, name: str) -> str:
        file = self._folder / name
        try:
            wait_until(lambda: file.stat().st_size > 0, _CONTENT_S, poll_s=0.01)
            return file.read_text()
        except FileNotFoundError:
            return ""


def _name(number: int, rank: int) -> str:
    return f"round-{number}-rank-{rank}"
