"""An executor that dies or is cut off, or a rank that freezes, while Spark trains on two hosts.

The hosts are network namespaces (paceline.runner.lab) with a standalone cluster; master and driver
are on the first. Ranks that communicate must detect the fault by themselves, within twice the limit
of a collective, and name the lost rank; in rounds only the driver can do that, and the whole
command ends within the same time. In all cases the outcome names a lost rank and its host, and all
processes end on both hosts. Those that the driver cannot reach end by themselves.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.trainings import PROGRAMS, Shares, Training, job_arguments, training

from paceline.base.host.processes import command_line_of
from paceline.collectives.host import wait_until
from paceline.runner.lab import INTERFACE, Host, Lab

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.needs("lab"),
    pytest.mark.timeout(400),  # the first test carries the cluster
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

# A loaded machine also needs some seconds to end Spark, which must be a small part of the limit.
LIMIT_S = 8.0
TWO_ON_A_HOST = {"ranks_per_node": 2, "oversubscribe": True}
KEYS: dict[str, dict[str, Any]] = {
    "gloo": {},
    "mpi": {},
    # A round lasts for seconds, so the fault falls into it.
    "spark-rounds": {**TWO_ON_A_HOST, "averaging_period_steps": 300},
}
HOST = 1  # the host of the fault; the driver is on the other

Start = Callable[[str], AbstractContextManager[Training]]


@pytest.fixture
def cluster(spark_lab: Lab) -> Lab:
    return spark_lab


@pytest.fixture
def under_way(cluster: Lab, tiny_dataset: Path, tmp_path: Path) -> Start:
    """Start an endless training over a transport, supervised as `paceline run` does."""

    def start(transport: str) -> AbstractContextManager[Training]:
        keys = {"transport": transport, **KEYS[transport]}
        words = job_arguments("spark", LIMIT_S, tiny_dataset, tmp_path / "run", **keys)
        program = [PROGRAMS / "supervised.py", "spark", cluster.spark_master]
        program += [tmp_path / "outcome.json", *words]
        command = cluster.hosts[0].command(sys.executable, *program)
        on_host = keys.get("ranks_per_node", 1)
        return training(cluster, tmp_path, [command], on_host)

    return start


@pytest.fixture(scope="module")
def shares(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shares]:
    """Keep and check the times until a fault was reported; in rounds, until the launcher ended."""
    made = Shares(LIMIT_S)
    yield made
    made.write(tmp_path_factory.getbasetemp() / "lost_executors.json")


def reasons(running: Training, host: Host) -> dict[int, dict[str, Any]]:
    """Return the statuses of the ranks of a host that detected the fault, by rank."""
    told = {rank: running.status(rank) for rank in running.ranks_on(host)}
    return {
        rank: status
        for rank, status in told.items()
        if status["state"] == "failed" and not status["secondary"]
    }


def assert_ranks_miss(running: Training, missing: list[int], host: Host, told: dict) -> float:
    """Check that the ranks of `told` name the first missing rank; return the last one's time."""
    assert told, "no rank detected the fault"
    for rank, status in told.items():
        assert status["error"].startswith(f"TimedOut: rank {rank}: "), status
        assert f"within {LIMIT_S:g} s" in status["error"]
        assert f"{missing[0]} ({host.name})" in status["error"]
    return max(status["written_unix_s"] for status in told.values())


def assert_outcome(running: Training, allowed: set[tuple[str, int]], blamed: list[int]) -> Any:
    """Check that the outcome blames one of some ranks and names the host of the fault."""
    outcome = running.outcome
    assert (outcome["status"], outcome["exit_code"]) in allowed, outcome
    host = running.lab.hosts[HOST].name
    assert host in outcome["message"]
    assert outcome["failed_rank"] in blamed, outcome
    return outcome


# Each takes half a minute. Without Spark, tests/cluster/test_lost_peers.py cuts a link under MPI.
OF_SOAK = ("mpi", "spark-rounds")
TIMED_OUT, FAILED = ("timed_out", 6), ("failed", 5)


@pytest.mark.parametrize(
    "transport", ["gloo", *(pytest.param(name, marks=pytest.mark.soak) for name in OF_SOAK)]
)
def test_cut_off_executor_is_reported_by_ranks_on_both_sides_and_ends(
    transport: str, under_way: Start, cluster: Lab, shares: Shares
) -> None:
    hosts = cluster.hosts
    with under_way(transport) as running:
        ranks = [running.ranks_on(host) for host in hosts]
        cluster.cut(hosts[HOST])
        try:
            cut_unix_s = time.time()
            running.wait_for_launchers()
            running.wait_for_nothing_on(0, HOST)
        finally:
            cluster.restore(hosts[HOST])
        if transport == "spark-rounds":
            outcome = assert_outcome(running, {TIMED_OUT, FAILED}, ranks[HOST])
            shares.record(f"{transport} cut, outcome", outcome["ended_unix_s"], cut_unix_s)
            return
        reporters = []
        for here, there in ((0, HOST), (HOST, 0)):
            told = reasons(running, hosts[here])
            last_unix_s = assert_ranks_miss(running, ranks[there], hosts[there], told)
            down = f"interface {INTERFACE} of this host ({hosts[here].name}) is down"
            assert [down in s["error"] for s in told.values()] == [here == HOST] * len(told)
            shares.record(f"{transport} cut, host {here}", last_unix_s, cut_unix_s)
            reporters += told
        assert_outcome(running, {TIMED_OUT}, reporters)


def test_frozen_rank_is_named_and_ends(under_way: Start, cluster: Lab, shares: Shares) -> None:
    """In rounds; ranks that communicate notice it as they notice a cut link."""
    with under_way("spark-rounds") as running:
        *_, frozen = running.ranks_on(cluster.hosts[HOST])
        freeze(running, frozen)
        frozen_unix_s = time.time()
        running.wait_for_launchers()
        running.wait_for_nothing_on(0, HOST)
        host = cluster.hosts[HOST]
        outcome = assert_outcome(running, {TIMED_OUT}, [frozen])
        assert f"rank {frozen} ({host.name})" in outcome["message"]
        shares.record("spark-rounds frozen, outcome", outcome["ended_unix_s"], frozen_unix_s)


@pytest.mark.parametrize(
    "transport", ["gloo", pytest.param("spark-rounds", marks=pytest.mark.soak)]
)
def test_ranks_of_a_killed_executor_are_named(
    transport: str, under_way: Start, cluster: Lab, shares: Shares
) -> None:
    """Rounds are a stage of tasks each; with gloo all ranks are one barrier stage."""
    with under_way(transport) as running:
        lost = running.ranks_on(cluster.hosts[HOST])
        [executor] = [
            pid
            for pid, words in running.programs_on(HOST).items()
            if any(word.endswith("CoarseGrainedExecutorBackend") for word in words)
        ]
        os.kill(executor, signal.SIGKILL)
        killed_unix_s = time.time()
        running.wait_for_launchers()
        running.wait_for_nothing_on(0, HOST)
        outcome = assert_outcome(running, {FAILED}, lost)
        shares.record(f"{transport} killed, outcome", outcome["ended_unix_s"], killed_unix_s)


def freeze(running: Training, rank: int) -> None:
    """Stop a rank while it works; between two rounds its status names the executor's process."""

    def stopped() -> bool:
        pid = running.status(rank)["pid"]
        if not any("pyspark.daemon" in word for word in command_line_of(pid)):
            return False
        os.kill(pid, signal.SIGSTOP)
        if running.status(rank)["pid"] == pid:
            return True
        os.kill(pid, signal.SIGCONT)  # its round had ended
        return False

    assert wait_until(stopped, 10 * LIMIT_S, poll_s=0.01)
