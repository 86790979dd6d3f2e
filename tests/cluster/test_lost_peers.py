"""A peer that dies, or a link that drops, in the middle of a training on two hosts.

The hosts are network namespaces (paceline.lab). Nobody ends the ranks: they have to find out by
themselves, within twice the limit of a collective, and say whom they miss.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pytest
from tests.environment import is_kept

from paceline.data.catalogue import ensure_dataset
from paceline.lab import INTERFACE
from paceline.launch.processes import command_line_of, is_alive, send, wait_until
from paceline.records.layout import RunFiles

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from paceline.lab import Lab
    from paceline.records.layout import TrialFiles

pytestmark = pytest.mark.cluster

LIMIT_S = 3.0
# Until the processes are gone, too: twice the limit, and what a busy machine takes to start ranks
# and to end Python and mpirun.
KILL_S = 60.0
PROGRAMS = Path(__file__).with_name("programs")
OPTIONS = (
    "--workload tiny --global-batch 8 --image-size 32 --epochs 100000 --max-steps 100000 "
    f"--no-sidecar --interface {INTERFACE} --collective-timeout {LIMIT_S:g}"
).split()


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ensure_dataset("tiny", images=24, seed=1, cache_dir=tmp_path_factory.mktemp("data"))


@dataclass(frozen=True)
class Training:
    """Under way on two hosts, rank n on host n."""

    lab: Lab
    folder: Path
    processes: list[subprocess.Popen[bytes]]

    @property
    def files(self) -> TrialFiles:
        [(_, files)] = RunFiles(self.folder / "run").trials()
        return files

    def wait_for_steps(self) -> None:
        """Until both ranks train."""
        self._wait_until(
            lambda: len(list(self.folder.glob("run/trials/*/ranks/*/steps.jsonl"))) == 2
        )
        for rank in (0, 1):
            steps = self.files.rank(rank).steps
            self._wait_until(partial(has_rows, steps, 3))
        assert [process.poll() for process in self.processes] == [None] * len(self.processes)

    def wait_for_end(self, ranks: Iterable[int]) -> None:
        """Until these ranks are gone by themselves."""
        pids = [self.status(rank)["pid"] for rank in ranks]
        self._wait_until(lambda: not any(is_alive(pid) for pid in pids))

    def wait_for_launchers(self) -> None:
        """Until whoever was started from here has ended by itself."""
        self._wait_until(lambda: all(process.poll() is not None for process in self.processes))

    def status(self, rank: int) -> dict[str, Any]:
        """What the rank last wrote, and when."""
        file = self.files.rank(rank).status
        return {**json.loads(file.read_text()), "written_unix_s": file.stat().st_mtime}

    def programs_on(self, number: int) -> set[str]:
        """Names of what runs on a host."""
        commands = [command_line_of(pid) for pid in self.lab.processes_on(self.lab.hosts[number])]
        return {Path(words[0]).name for words in commands if words}

    def _wait_until(self, done: Callable[[], bool]) -> None:
        assert wait_until(done, KILL_S), (self.folder / "log.txt").read_text()


def has_rows(file: Path, count: int) -> bool:
    return file.read_bytes().count(b"\n") >= count


Start = Callable[[str], AbstractContextManager[Training]]
Record = Callable[[str, dict[str, Any], float], None]


@pytest.fixture
def under_way(fresh_lab: Lab, dataset: Path, tmp_path: Path) -> Start:
    """Steps without end, by a transport; all of it is gone afterwards."""
    kept = {k: v for k, v in os.environ.items() if is_kept(k)}
    options = [*OPTIONS, "--data", str(dataset), "--out", str(tmp_path / "run")]

    @contextmanager
    def start(transport: str) -> Iterator[Training]:
        commands = (under_mpirun if transport == "mpi" else each_by_itself)(
            fresh_lab, options, tmp_path
        )
        log = tmp_path / "log.txt"
        processes: list[subprocess.Popen[bytes]] = []
        with log.open("ab") as output:
            try:
                for command in commands:
                    process = subprocess.Popen(
                        command, env=kept, cwd=tmp_path, stdout=output, stderr=output
                    )
                    processes.append(process)
                running = Training(fresh_lab, tmp_path, processes)
                running.wait_for_steps()
                yield running
            finally:
                for host in fresh_lab.hosts:
                    send(fresh_lab.processes_on(host), signal.SIGKILL)
                for process in processes:
                    process.wait(timeout=10)

    return start


@pytest.fixture(scope="module")
def record_took(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Record]:
    """Keeps how long ranks took to say why they failed, by their statuses' own clock."""
    took: dict[str, float] = {}

    def record(what: str, status: dict[str, Any], since_unix_s: float) -> None:
        took[what] = round((status["written_unix_s"] - since_unix_s) / LIMIT_S, 2)

    yield record
    file = tmp_path_factory.getbasetemp() / "lost_peers.json"
    file.write_text(json.dumps({"limit_s": LIMIT_S, "share_of_limit_taken": took}, indent=1))


def under_mpirun(lab: Lab, options: list[str], folder: Path) -> list[list[str]]:
    """Looked after on the first host as `paceline run` does it."""
    words = [PROGRAMS / "supervised.py", lab.hostfile, folder / "outcome.json", *options]
    return [lab.hosts[0].command(sys.executable, *words, "--transport", "mpi")]


def each_by_itself(lab: Lab, options: list[str], folder: Path) -> list[list[str]]:
    """Nobody is there who would end one because of the other."""
    meeting = folder / "meeting.json"
    return [
        host.command(
            sys.executable, PROGRAMS / "rank.py", rank, len(lab.hosts), meeting, *options,
            "--transport", "gloo",
        )
        for rank, host in enumerate(lab.hosts)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("transport", "where"), [("gloo", "cable"), ("gloo", "switch"), ("mpi", "cable")]
)
def test_link_that_drops_is_told_by_the_ranks_on_both_sides(
    transport: str, where: Literal["cable", "switch"], under_way: Start, record_took: Record
) -> None:
    with under_way(transport) as running:
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
            record_took(f"{transport} {where} rank {rank}", status, dropped_unix_s)
        running.wait_for_launchers()
        if transport == "mpi":
            outcome = json.loads((running.folder / "outcome.json").read_text())
            assert (outcome["status"], outcome["exit_code"]) == ("timed_out", 6)
            assert f"({names[1]}) does not answer" in outcome["message"]
            # out of reach, mpirun's daemon waits until TCP gives up
            assert running.programs_on(1) <= {"prted"}
        else:
            assert [process.returncode for process in running.processes] == [6, 6]
            assert running.programs_on(1) == set()
        assert running.programs_on(0) == set()


def test_killed_rank_is_named_by_its_peer(under_way: Start, record_took: Record) -> None:
    with under_way("gloo") as running:
        os.kill(running.status(1)["pid"], signal.SIGKILL)
        killed_unix_s = time.time()
        running.wait_for_launchers()
        status = running.status(0)
        assert status["error"].startswith("PeerLost: rank 0: a peer closed its connection")
        assert f"rank 1 ({running.lab.hosts[1].name}) does not answer" in status["error"]
        assert status["secondary"]
        assert [process.returncode for process in running.processes] == [5, -signal.SIGKILL]
        record_took("gloo kill rank 0", status, killed_unix_s)


@pytest.mark.parametrize(("transport", "frozen"), [("gloo", 0), ("mpi", 1)])
def test_frozen_rank_is_named_by_its_peer(
    transport: str, frozen: int, under_way: Start, record_took: Record
) -> None:
    """Rank 0 serves the store as well: then it is the store that does not answer."""
    with under_way(transport) as running:
        os.kill(running.status(frozen)["pid"], signal.SIGSTOP)
        frozen_unix_s = time.time()
        running.wait_for_end([1 - frozen])
        status = running.status(1 - frozen)
        assert status["error"].startswith(f"TimedOut: rank {1 - frozen}: ")
        assert f"rank {frozen} ({running.lab.hosts[frozen].name})" in status["error"]
        assert "does not answer" in status["error"]
        record_took(f"{transport} frozen {frozen}", status, frozen_unix_s)
        if transport == "mpi":  # mpirun then ends the other
            running.wait_for_launchers()
            assert running.programs_on(0) | running.programs_on(1) == set()
