"""Probes on several hosts, started by a remote shell as mpirun starts its daemons."""

from __future__ import annotations

import json
import os
import queue
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

from pydantic import TypeAdapter

from paceline.base.errors import EnvironmentLacks
from paceline.base.host.machine import own_addresses
from paceline.base.host.processes import end_processes, guarded
from paceline.collectives.host import host_name
from paceline.runner.preflight.probe import MARK

_END_S = 3.0
# The programs that mpirun of Open MPI 5, of Open MPI 4 and of MPICH use in place of ssh.
_AGENT_VARIABLES = ("PRTE_MCA_plm_ssh_agent", "OMPI_MCA_plm_rsh_agent", "HYDRA_LAUNCHER_EXEC")
_SSH = "ssh -o BatchMode=yes -o ConnectTimeout=10"
_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True)
class NoAnswer:
    """A host does not answer a request, or cannot do what is asked."""

    why: str

    def as_error(self, name: str) -> EnvironmentLacks:
        return EnvironmentLacks(f"host {name}: {self.why}")


def remote_shell(environment: Mapping[str, str] = os.environ) -> str:
    """Return the program that mpirun would use to start its daemons: `PROGRAM HOST COMMAND`."""
    found = (environment.get(name) for name in _AGENT_VARIABLES)
    return next((agent for agent in found if agent), _SSH)


class _Probe:
    """The probe on one host, and the process here that is connected with it."""

    def __init__(self, argv: Sequence[str], opened: ExitStack) -> None:
        self._answers: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._errors = opened.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
        self._fault: NoAnswer | None = None  # after which answers would be those of other requests
        self.process = subprocess.Popen(
            guarded(argv), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors
        )
        threading.Thread(target=self._read, daemon=True).start()

    def send(self, request: str, arguments: Mapping[str, Any]) -> None:
        assert self.process.stdin is not None
        line = json.dumps({"request": request, "arguments": arguments}) + "\n"
        with suppress(OSError):  # it has ended, and `answer` says why
            self.process.stdin.write(line.encode())
            self.process.stdin.flush()

    def answer(self, deadline_s: float) -> Any:
        """Return the next answer, or a NoAnswer; deadline_s: as time.monotonic() counts."""
        if self._fault is not None:
            return self._fault
        try:
            line = self._answers.get(timeout=max(0.0, deadline_s - time.monotonic()))
        except queue.Empty:
            self._fault = NoAnswer("no answer in time")
            return self._fault
        if line is None:
            self._fault = NoAnswer(f"its probe has ended: {self._last_error()}")
            return self._fault
        answer = json.loads(line)
        return NoAnswer(answer["error"]) if "error" in answer else answer["value"]

    def end_input(self) -> None:
        assert self.process.stdin is not None
        with suppress(OSError):
            self.process.stdin.close()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            text = line.decode(errors="replace")
            if text.startswith(MARK):
                self._answers.put(text.removeprefix(MARK))
        self._answers.put(None)

    def _last_error(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(_END_S)
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"it ended with {self.process.returncode}"


class Probes:
    """The probes of all hosts. The end of a `with` block ends them."""

    def __init__(self, names: Sequence[str], agent: str) -> None:
        """agent: a remote shell. Raises EnvironmentLacks if there is no such program."""
        self.names = list(names)
        self._opened = ExitStack()
        self._probes: list[_Probe] = []
        try:
            for name in names:
                self._probes.append(_Probe(_command(name, agent), self._opened))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the probes in order, so that they remove their files, and kill those that stay."""
        for probe in self._probes:
            probe.end_input()
        deadline_s = time.monotonic() + _END_S
        for probe in self._probes:
            with suppress(subprocess.TimeoutExpired):
                probe.process.wait(max(0.0, deadline_s - time.monotonic()))
        end_processes([probe.process for probe in self._probes], _END_S)
        self._opened.close()

    def ask(
        self,
        kind: type[_Value],
        request: str,
        arguments: Mapping[int, Mapping[str, Any]],
        limit_s: float,
    ) -> dict[int, _Value | NoAnswer]:
        """Send one request to hosts at the same time; return the answers of type `kind`.

        arguments: for each host that is asked, by its number.
        """
        for number, given in arguments.items():
            self._probes[number].send(request, given)
        deadline_s = time.monotonic() + limit_s
        found = {number: self._probes[number].answer(deadline_s) for number in arguments}
        adapter: TypeAdapter[_Value] = TypeAdapter(kind)
        return {
            number: answer if isinstance(answer, NoAnswer) else adapter.validate_python(answer)
            for number, answer in found.items()
        }


def _command(name: str, agent: str) -> list[str]:
    """Return the command of a probe: the same Python in the same folder, as mpirun starts ranks."""
    probe = shlex.join([sys.executable, "-P", "-m", "paceline.runner.preflight.probe"])
    line = f"cd {shlex.quote(str(Path.cwd()))} && exec {probe}"
    if _is_here(name):
        return ["sh", "-c", line]
    program, *options = shlex.split(agent)
    path = shutil.which(program)
    if path is None:
        raise EnvironmentLacks(
            f"expected the program {program} to start a probe on host {name}, found none; install "
            "it, or name another one with --agent"
        )
    return [path, *options, name, line]


def _is_here(name: str) -> bool:
    if name in (host_name(), "localhost"):
        return True
    try:
        return socket.gethostbyname(name) in own_addresses()
    except OSError:
        return False
