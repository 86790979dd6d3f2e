"""A peer that dies, or a link that drops, in the middle of a training on two hosts.

The hosts are network namespaces (paceline.runner.lab). No launcher ends the ranks: they must detect
the fault by themselves, within twice the limit of a collective, and name the lost rank.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any, Literal

import pytest
from tests.cluster.trainings import PROGRAMS, Shares, Training, job_arguments, training
from tests.support.forking import ForkServer, fork_server

from paceline.base.host.processes import send
from paceline.runner.lab import INTERFACE, Lab

pytestmark = [pytest.mark.cluster, pytest.mark.needs("lab")]

LIMIT_S = 6.0

Start = Callable[..., AbstractContextManager[Training]]
Record = Callable[[str, dict[str, Any], float], None]


@pytest.fixture(scope="module")
def pythons(lab: Lab) -> Iterator[list[ForkServer]]:
    """Start ranks quickly on each host."""
    with ExitStack() as stack:
        yield [stack.enter_context(fork_server(host.command())) for host in lab.hosts]


@pytest.fixture
def under_way(
    lab: Lab, pythons: list[ForkServer], tiny_dataset: Path, tmp_path: Path
) -> Iterator[Start]:
    """Start an endless training over a transport; nothing of it is left afterwards."""

    def start(transport: str, factors: str = "never") -> AbstractContextManager[Training]:
        keys = {"transport": transport, "sufficient_factors": factors}
        words = job_arguments("mpi", LIMIT_S, tiny_dataset, tmp_path / "run", **keys)
        if transport == "mpi":
            return training(lab, tmp_path, under_mpirun(lab, words, tmp_path))
        return training(lab, tmp_path, each_by_itself(lab, pythons, words, tmp_path))

    yield start
    for host in lab.hosts:
        lab.restore(host)


@pytest.fixture(scope="module")
def record_took(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Record]:
    """Keep and check the time until ranks reported a fault, by the times of their statuses."""
    shares = Shares(LIMIT_S)

    def record(what: str, status: dict[str, Any], since_unix_s: float) -> None:
        shares.record(what, status["written_unix_s"], since_unix_s)

    yield record
    shares.write(tmp_path_factory.getbasetemp() / "lost_peers.json")


def under_mpirun(lab: Lab, options: list[str], folder: Path) -> list[list[str]]:
    """Return the command that supervises ranks from the first host as `paceline run` does."""
    words = [PROGRAMS / "supervised.py", "mpi", lab.hostfile, folder / "outcome.json", *options]
    return [lab.hosts[0].command(sys.executable, *words)]


def each_by_itself(
    lab: Lab, pythons: list[ForkServer], options: list[str], folder: Path
) -> list[list[str]]:
    """Return a command for each rank, so that nothing ends one because of the other."""
    meeting = folder / "meeting.json"
    return [
        host.command(
            *python.python, PROGRAMS / "rank.py", rank, len(lab.hosts), meeting, *options
        )
        for rank, (host, python) in enumerate(zip(lab.hosts, pythons, strict=True))
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("transport", "where", "factors"),
    [("gloo", "cable", "always"), ("gloo", "switch", "never"), ("mpi", "cable", "always")],
)
def test_link_that_drops_is_reported_by_the_ranks_on_both_sides(
    transport: str,
    where: Literal["cable", "switch"],
    factors: str,
    under_way: Start,
    record_took: Record,
) -> None:
    with under_way(transport, factors) as running:
        names = [host.name for host in running.lab.hosts]
        running.lab.cut(running.lab.hosts[1], where)
        dropped_unix_s = time.time()
        running.wait_for_end([0, 1])
        for rank in (0, 1):
            status = running.status(rank)
            peer = 1 - rank
            assert status["error"].startswith(f"TimedOut: rank {rank}: "), status
            assert f"within {LIMIT_S:g} s" in status["error"]
            assert f"rank {peer} ({names[peer]})" in status["error"]
            down = f"interface {INTERFACE} of this host ({names[rank]}) is down"
            assert (down in status["error"]) == (rank == 1), "who can see it, says it"
            what = f"{transport} {where} rank {rank}, factors {factors}"
            record_took(what, status, dropped_unix_s)
        running.wait_for_launchers()
        if transport == "mpi":
            outcome = running.outcome
            assert (outcome["status"], outcome["exit_code"]) == ("timed_out", 6)
            assert f"({names[1]}) does not answer" in outcome["message"]
            # mpirun's daemon is unreachable and waits for the time-out of TCP
            assert running.names_on(1) <= {"prted"}
        else:
            assert [process.returncode for process in running.processes] == [6, 6]
            assert running.names_on(1) == set()
        assert running.names_on(0) == set()


@pytest.mark.parametrize("factors", ["never", "always"])
def test_killed_rank_is_named_by_its_peer(
    factors: str, under_way: Start, record_took: Record
) -> None:
    with under_way("gloo", factors) as running:
        os.kill(running.status(1)["pid"], signal.SIGKILL)
        killed_unix_s = time.time()
        running.wait_for_launchers()
        status = running.status(0)
        assert status["error"].startswith("PeerLost: rank 0: a peer has ended or closed its")
        assert f"rank 1 ({running.lab.hosts[1].name}) does not answer" in status["error"]
        assert status["secondary"]
        assert [process.returncode for process in running.processes] == [5, -signal.SIGKILL]
        record_took(f"gloo kill rank 0, factors {factors}", status, killed_unix_s)


@pytest.mark.parametrize(
    ("transport", "frozen", "factors"), [("gloo", 0, "always"), ("mpi", 1, "never")]
)
def test_frozen_rank_is_named_by_its_peer(
    transport: str, frozen: int, factors: str, under_way: Start, record_took: Record
) -> None:
    """Rank 0 also serves the store, so then the store does not answer."""
    with under_way(transport, factors) as running:
        os.kill(running.status(frozen)["pid"], signal.SIGSTOP)
        frozen_unix_s = time.time()
        running.wait_for_end([1 - frozen])
        status = running.status(1 - frozen)
        assert status["error"].startswith(f"TimedOut: rank {1 - frozen}: ")
        assert f"rank {frozen} ({running.lab.hosts[frozen].name})" in status["error"]
        assert "does not answer" in status["error"]
        record_took(f"{transport} frozen {frozen}, factors {factors}", status, frozen_unix_s)
        if transport == "mpi":  # mpirun then ends the other
            running.wait_for_launchers()
            assert running.names_on(0) | running.names_on(1) == set()


@pytest.mark.parametrize("lost", ["rank", "host"])
def test_rank_that_is_killed_under_mpirun_is_named_and_not_its_peer(
    lost: str, under_way: Start
) -> None:
    """Open MPI ends the other rank as soon as the connection closes, which mpirun may see first."""
    with under_way("mpi") as running:
        pid = running.status(1)["pid"]
        send([pid] if lost == "rank" else running.programs_on(1), signal.SIGKILL)
        running.wait_for_launchers()
        outcome = running.outcome
        name = running.lab.hosts[1].name
        assert (outcome["status"], outcome["failed_rank"]) == ("failed", 1), outcome["message"]
        words = (
            r"was killed (by SIGKILL \(signal 9\)|or crashed)"  # mpirun may not pass it on
            if lost == "rank"
            else "wrote no error; .* was lost"
        )
        assert re.search(rf"rank 1 of 2 \(host {name}, pid {pid}\) {words}", outcome["message"])
