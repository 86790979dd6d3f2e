"""Endless trainings on the hosts of a lab, for tests that inject a fault."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tests.support.environment import kept_environment
from tests.support.job_specs import NO_SIDECAR, job_words

from paceline.base.host.processes import command_line_of, is_alive, send
from paceline.collectives.host import wait_until
from paceline.measure.records.layout import RunFiles, TrialFiles
from paceline.runner.lab import INTERFACE, Host, Lab
from paceline.runner.lab.network import processes_in

PROGRAMS = Path(__file__).with_name("programs")
# Time for a busy machine to start Spark and ranks.
START_S = 120.0
# Time until all processes have ended, on a busy machine: Python, mpirun and Spark take their time.
KILL_S = 60.0
# Limits of a collective until a rank reports a lost peer (docs/explanation/transports.md).
MOST_LIMITS = 2.0


def job_arguments(launcher: str, limit_s: float, data: Path, out: Path, **keys: Any) -> list[str]:
    """Return arguments of the job scripts for small ranks on two nodes that train for ever."""
    endless = {
        "nodes": 2, "ranks_per_node": 1, "data": data, "global_batch": 8, "image_size": 32,
        "epochs": 100_000, "max_steps": 100_000, "telemetry": NO_SIDECAR, "interface": INTERFACE,
        "collective_s": limit_s,
    }  # fmt: skip
    return [*job_words(out.parent, launcher, **{**endless, **keys}), "--out", str(out)]


@dataclass(frozen=True, slots=True)
class Training:
    """A training that runs on the hosts of a lab, with the same number of ranks on each."""

    lab: Lab
    folder: Path
    before: set[int]  # processes that ran on the hosts before
    processes: list[subprocess.Popen[bytes]]
    ranks: int

    @property
    def files(self) -> TrialFiles:
        [(_, files)] = RunFiles(self.folder / "run").trials()
        return files

    @property
    def outcome(self) -> dict[str, Any]:
        """Read the outcome that programs/supervised.py wrote."""
        found: dict[str, Any] = json.loads((self.folder / "outcome.json").read_text())
        return found

    def wait_for_steps(self) -> None:
        """Wait until all ranks train."""
        files = "run/trials/*/ranks/*/steps.jsonl"

        def started() -> bool:
            return len(list(self.folder.glob(files))) == self.ranks

        wait_until(lambda: started() or not self._all_run(), START_S)
        assert started(), self._log()
        for rank in range(self.ranks):
            steps = self.files.rank(rank).steps
            self._wait_until(partial(has_rows, steps, 2))
        assert self._all_run()

    def _all_run(self) -> bool:
        return all(process.poll() is None for process in self.processes)

    def wait_for_end(self, ranks: Iterable[int]) -> None:
        """Wait until these ranks have ended by themselves."""
        pids = [self.status(rank)["pid"] for rank in ranks]
        self._wait_until(lambda: not any(is_alive(pid) for pid in pids))

    def wait_for_launchers(self) -> None:
        """Wait until the processes that the test started have ended by themselves."""
        self._wait_until(lambda: all(process.poll() is not None for process in self.processes))

    def status(self, rank: int) -> dict[str, Any]:
        """Read the last status of a rank, with its error as text and the time of writing."""
        file = self.files.rank(rank).status
        row = json.loads(file.read_text())
        error = row["error"] and f"{row['error']['kind']}: {row['error']['message']}"
        return {**row, "error": error, "written_unix_s": file.stat().st_mtime}

    def ranks_on(self, host: Host) -> list[int]:
        """Return the ranks that the launcher has placed on a host."""
        return [rank for rank in range(self.ranks) if self.status(rank)["host"] == host.name]

    def programs_on(self, number: int) -> dict[int, list[str]]:
        """Return the command lines of the training's processes on a host by process id."""
        pids = processes_in(self.lab.hosts[number].namespace) - self.before
        commands = {pid: command_line_of(pid) for pid in pids}
        return {pid: words for pid, words in commands.items() if words}

    def names_on(self, number: int) -> set[str]:
        """Return the names of the training's programs on a host."""
        return {Path(words[0]).name for words in self.programs_on(number).values()}

    def wait_for_nothing_on(self, *numbers: int) -> None:
        """Wait until all processes of the training on these hosts have ended by themselves."""
        gone = wait_until(lambda: not any(map(self.programs_on, numbers)), KILL_S)
        assert gone, [self.programs_on(number) for number in numbers]

    def _wait_until(self, done: Callable[[], bool], limit_s: float = KILL_S) -> None:
        assert wait_until(done, limit_s), self._log()

    def _log(self) -> str:
        logs = [self.folder / "log.txt", *self.folder.glob("run/trials/*/launcher.log")]
        return "\n".join(log.read_text() for log in logs)


def has_rows(file: Path, count: int) -> bool:
    return file.read_bytes().count(b"\n") >= count


@contextmanager
def training(
    lab: Lab, folder: Path, commands: Iterable[list[str]], ranks_per_host: int = 1
) -> Iterator[Training]:
    """Start `commands`, yield when all ranks train, and kill what is left at the end."""
    before = {pid for host in lab.hosts for pid in processes_in(host.namespace)}
    processes: list[subprocess.Popen[bytes]] = []
    with (folder / "log.txt").open("ab") as output:
        try:
            for command in commands:
                process = subprocess.Popen(
                    command, env=kept_environment(), cwd=folder, stdout=output, stderr=output
                )
                processes.append(process)
            running = Training(lab, folder, before, processes, len(lab.hosts) * ranks_per_host)
            running.wait_for_steps()
            yield running
        finally:
            for host in lab.hosts:
                send(processes_in(host.namespace) - before, signal.SIGKILL)
            for process in processes:
                process.wait(timeout=10)


class Shares:
    """Times until a fault was reported, as shares of the limit of a collective."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._taken: dict[str, float] = {}

    def record(self, what: str, reported_unix_s: float, since_unix_s: float) -> None:
        """Keep the time and check it against the documented bound."""
        taken_s = reported_unix_s - since_unix_s
        self._taken[what] = round(taken_s / self._limit_s, 2)
        assert 0 <= taken_s <= MOST_LIMITS * self._limit_s, f"{what}: {self._taken}"

    def write(self, file: Path) -> None:
        content = {"limit_s": self._limit_s, "share_of_limit_taken": self._taken}
        file.write_text(json.dumps(content, indent=1))
