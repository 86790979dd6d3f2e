"""A run directory on a real file system that becomes full, or that is lost: one message, an exit
code, no remains, and no finished trial is lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.functional.cli_runs import SMALL, THREADS, Cli, slowed
from tests.functional.long_runs import LONG, STARTED_WITHIN_S, alive
from tests.support.commands import start_command
from tests.support.waiting import pid_after_steps, wait_for

pytestmark = [pytest.mark.functional, pytest.mark.needs("tmpfs"), pytest.mark.timeout(300)]

ENDS_WITHIN_S = 30.0
REPORTED_WITHIN_S = 10.0  # what the project promises; the 4 s for the launcher are a part of it
# Mounts a file system of some size at a folder, for itself only, and becomes the command.
MOUNTED = 'mount -t tmpfs -o "size=$1" tmpfs "$2" && shift 2 && exec "$@"'
# The first trial ends before the fault, the second one trains long enough for it.
TWO_TRIALS = LONG + THREADS
FIRST, SECOND = "local.none.sequential", "local.none.threads"


@dataclass
class SmallDisk:
    """`paceline run` with its run directory on a small file system that only it can see.

    Files below `run_dir` and commands of `inside` reach the file system also after the run.
    """

    cli: Cli
    folder: Path
    spec: Path
    size: str
    log: Path
    process: subprocess.Popen[bytes] | None = None
    namespace: int | None = None

    @property
    def run_dir(self) -> Path:
        return self.folder / "run"

    def start(self) -> None:
        """Start the run on a new file system; afterwards resume it."""
        is_new = self.namespace is None
        run = [self.spec, "--out", self.run_dir] if is_new else ["--resume", self.run_dir]
        words = self.cli.argv("run", "--exit-first", *run)
        if self.namespace is None:
            private = ["unshare", "--mount", "--propagation", "private", "sh", "-c", MOUNTED, "sh"]
            argv = [*private, self.size, str(self.folder), *words]
        else:
            argv = self._entering(*words)
        self.process = start_command(
            argv, self.log, env=self.cli.environment, cwd=self.folder.parent, pass_fds=self._kept()
        )

    def keep(self) -> None:
        """Keep the file system beyond the end of the run."""
        assert self.process is not None
        self.namespace = os.open(f"/proc/{self.process.pid}/ns/mnt", os.O_RDONLY)

    def inside(self, *argv: object) -> str:
        """Run a command that sees the file system; return its output."""
        words = self._entering(*map(str, argv))
        return subprocess.run(
            words, check=True, capture_output=True, text=True, timeout=30, pass_fds=self._kept()
        ).stdout

    def _entering(self, *argv: str) -> list[str]:
        return ["nsenter", f"--mount=/proc/self/fd/{self.namespace}", *argv]

    def _kept(self) -> list[int]:
        return [] if self.namespace is None else [self.namespace]

    @contextmanager
    def frozen_in_training(self, configuration: str, *, attempts: int) -> Iterator[None]:
        """Freeze a rank that has taken a step, so that it cannot end before the fault.

        attempts: how many have been set aside before.
        """
        assert self.process is not None
        seen = Path(f"/proc/{self.process.pid}/root{self.run_dir}")

        def trains() -> int | None:
            is_new = len(list(seen.glob("attempts/*"))) == attempts
            ranks = seen.glob(f"trials/tiny.{configuration}.*/ranks/0")
            return next(filter(None, map(pid_after_steps, ranks)), None) if is_new else None

        pid = wait_for(trains, STARTED_WITHIN_S, f"{configuration} training", self.process)
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(pid, signal.SIGCONT)

    def end(self, limit_s: float = ENDS_WITHIN_S) -> tuple[int, str]:
        """Wait for the end; return the exit code and all output."""
        assert self.process is not None
        code = self.process.wait(timeout=limit_s)
        return code, self.log.read_text()

    def assert_reported(self, reason: str, limit_s: float) -> None:
        """Check that the run ends in time with one message that names the reason."""
        code, output = self.end(limit_s)
        assert code == 3, output
        messages = [line for line in output.splitlines() if line.startswith("paceline: ")]
        assert len([line for line in messages if "warning" not in line]) == 1, output
        assert reason in output
        assert "Traceback" not in output
        assert alive(self.folder) == {}

    def first_outcome(self) -> str:
        [file] = self.inside("find", self.run_dir, "-path", f"*{FIRST}*/outcome.json").split()
        return self.inside("cat", file)


@pytest.fixture
def disk(paceline: Cli, tmp_path: Path, tiny_dataset: Path) -> Iterator[Callable[..., SmallDisk]]:
    made = []

    def make(spec: str, size: str) -> SmallDisk:
        folder, file = tmp_path / "disk", tmp_path / "spec.toml"
        folder.mkdir()
        # With this seed the baseline is the first trial.
        spec = spec.replace("samples = 48", f'data = "{tiny_dataset}"')
        file.write_text(spec.replace("seed = 3", "seed = 5"))
        made.append(SmallDisk(slowed(paceline), folder, file, size, tmp_path / "log.txt"))
        return made[-1]

    yield make
    for each in made:
        if each.process is not None and each.process.poll() is None:
            each.process.kill()
            each.process.wait(timeout=30)
        if each.namespace is not None:
            os.close(each.namespace)


def test_disk_that_is_full_or_lost_while_a_rank_trains_loses_no_finished_trial(disk) -> None:
    """Then neither steps nor the sample log, the status or the outcome can be written."""
    run = disk(TWO_TRIALS, "24m")
    run.start()
    fill = run.folder / "fill"
    with run.frozen_in_training(SECOND, attempts=0):
        run.keep()
        before = run.first_outcome()
        assert json.loads(before)["status"] == "ok"
        run.inside("sh", "-c", f"cat /dev/zero > {fill} 2> /dev/null || true")
    run.assert_reported("No space left on device", REPORTED_WITHIN_S)
    assert run.first_outcome() == before

    run.inside("rm", fill)
    run.start()
    with run.frozen_in_training(SECOND, attempts=1):
        # As a network file system whose server has gone: the folder is empty and read-only. The
        # rank can write to its open files until it has ended.
        run.inside("mount", "-t", "tmpfs", "-o", "ro", "tmpfs", run.run_dir)
    run.assert_reported("Read-only file system", STARTED_WITHIN_S)
    run.inside("umount", run.run_dir)
    assert run.first_outcome() == before

    run.start()
    code, output = run.end(STARTED_WITHIN_S)
    assert code == 0, output
    assert run.first_outcome() == before


def test_disk_without_room_for_the_first_file_is_reported_before_a_trial(disk) -> None:
    run = disk(SMALL, "4k")
    run.start()
    code, output = run.end()
    assert code == 3, output
    assert "No space left on device" in output
    assert f"paceline: {run.folder}/run/" in output, "the file is named"
    assert "Traceback" not in output
