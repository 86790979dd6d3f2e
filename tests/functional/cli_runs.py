"""Whole runs through the command line."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import re
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TypeVar
from unittest import mock

from tests.support.commands import run_command, start_command
from tests.support.environment import kept_environment
from tests.support.forking import ForkServer

from paceline.cli import main
from paceline.runner.launchers import local
from paceline.runner.launchers.mpi import launcher as mpi

LIMIT_S = 240
FAULTS = Path(__file__).parent / "programs" / "faults"
_ATTEMPTS = 3
_Result = TypeVar("_Result")

SMALL = """
schema = 2
name = "small"
seed = 3
repeats = 1
measure_again = false
[training]
max_steps = 20
epochs = 8
warmup_steps = 2
global_batch = 16
image_size = 128
dropout = false
[[workloads]]
name = "tiny"
samples = 48
[telemetry]
interval_s = 0.1
[limits]
trial_s = 120
rendezvous_s = 40
collective_s = 20
[[trials]]
launcher = "local"
local_strategy = "sequential"
"""

THREADS = """
[[trials]]
launcher = "local"
local_strategy = "threads"
replicas = 2
oversubscribe = true
"""
# To be replaced in SMALL.
NO_SIDECAR = ("interval_s = 0.1", "enabled = false")


def small(data: object = None, **values: object) -> str:
    """Return SMALL with other values of some of its keys; data: a data set of its own."""
    text = SMALL if data is None else SMALL.replace("samples = 48", f'data = "{data}"')
    for key, value in values.items():
        line = f"{key} = {json.dumps(value)}"
        text, count = re.subn(rf"^{key} = .*", line, text, flags=re.MULTILINE)
        assert count == 1, key
    return text


def trial(launcher: str, transport: str, **values: object) -> str:
    """A [[trials]] entry with two one-thread ranks of `processes`, or other values."""
    usual = {"local_strategy": "processes", "ranks_per_node": 2, "oversubscribe": True}
    keys = {"launcher": launcher, "transport": transport, **usual, **values}
    lines = [f"{key} = {json.dumps(value)}\n" for key, value in keys.items()]
    return "[[trials]]\n" + "".join(lines)


@dataclass(frozen=True)
class Cli:
    """`paceline …` with a cache of its own."""

    environment: dict[str, str]
    cwd: Path
    forks: ForkServer | None = None  # starts the ranks of `main` under `local` and `mpi`

    def __call__(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        """Run a command in a process of its own, as a user does."""
        return run_command(self.argv(*arguments), LIMIT_S, env=self.environment, cwd=self.cwd)

    def main(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        """Run a command in this process, which saves the imports; an error that would show a
        stack trace is raised.

        For commands whose process is not what a test looks at. Trials have processes of their own
        here, too. The limit is that of the test.
        """
        argv = list(map(str, arguments))
        with (
            mock.patch.dict(os.environ, self.environment, clear=True),
            contextlib.chdir(self.cwd),
            self._ranks(),
            contextlib.redirect_stdout(io.StringIO()) as out,
            contextlib.redirect_stderr(io.StringIO()) as err,
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("default")
            try:
                code = main(argv)
            except SystemExit as ended:
                code = ended.code if isinstance(ended.code, int) else 1
        return subprocess.CompletedProcess(argv, code, out.getvalue(), err.getvalue())

    @contextlib.contextmanager
    def _ranks(self) -> Iterator[None]:
        """Let the launchers start ranks as forks."""
        with contextlib.ExitStack() as stack:
            for launcher in (local, mpi) if self.forks is not None else ():
                own = SimpleNamespace(executable=str(self.forks.python_of_ranks))
                stack.enter_context(mock.patch.object(launcher, "sys", own))
            yield

    def start(self, *arguments: str | Path, log: Path) -> subprocess.Popen[bytes]:
        """The same in the background; the caller ends it."""
        return start_command(self.argv(*arguments), log, env=self.environment, cwd=self.cwd)

    @staticmethod
    def argv(*arguments: str | Path) -> list[str]:
        return [sys.executable, "-m", "paceline.cli", *map(str, arguments)]


def cli_in(cache: Path, folder: Path, forks: ForkServer | None = None) -> Cli:
    """Return the command line in a folder. cache: PACELINE_CACHE of what the tests run."""
    environment = kept_environment(PACELINE_CACHE=str(cache), COLUMNS="80", NO_COLOR="1")
    return Cli(environment=environment, cwd=folder, forks=forks)


def slowed(cli: Cli, seconds: float = 0.05) -> Cli:
    """Return the same with steps that sleep: a training lasts, and leaves the cores to others."""
    environment = {**cli.environment, "PYTHONPATH": str(FAULTS), "SLEEP_S": str(seconds)}
    return dataclasses.replace(cli, environment=environment)


def within(limit_s: float, run: Callable[[], _Result]) -> _Result:
    """Return what `run` returns. One of three calls must take less than the limit, because other
    processes may delay a call on a busy machine."""
    taken_s = []
    for _ in range(_ATTEMPTS):
        began_s = time.monotonic()
        result = run()
        taken_s.append(time.monotonic() - began_s)
        if taken_s[-1] < limit_s:
            return result
    raise AssertionError(f"expected less than {limit_s:g} s, got {taken_s}")
