"""A run directory on a real file system that becomes full: a message, an exit code, no remains."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.functional.cli_runs import SMALL, Cli
from tests.functional.test_killed_rank import (
    ENDLESS,
    STARTED_WITHIN_S,
    alive,
    running_rank,
    wait_for,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = [pytest.mark.functional, pytest.mark.needs("tmpfs"), pytest.mark.timeout(300)]

ENDS_WITHIN_S = 30.0
# Mounts a file system of some size at a folder, for itself only, and becomes the command.
MOUNTED = 'mount -t tmpfs -o "size=$1" tmpfs "$2" && shift 2 && exec "$@"'


@dataclass
class OnSmallDisk:
    """`paceline run` with its run directory on a small file system that only it can see."""

    process: subprocess.Popen[bytes]
    folder: Path
    log: Path

    @property
    def run_dir(self) -> Path:
        """The run directory as this process can reach it."""
        return Path(f"/proc/{self.process.pid}/root{self.folder}") / "run"

    def fill(self) -> None:
        """Take all free space."""
        with (self.run_dir.parent / "fill").open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError:
                return

    def end(self) -> tuple[int, str]:
        """Wait for the end; return the exit code and all output."""
        code = self.process.wait(timeout=ENDS_WITHIN_S)
        return code, self.log.read_text()


@pytest.fixture
def start(paceline: Cli, tmp_path: Path) -> Iterator[Callable[[str, str], OnSmallDisk]]:
    started = []

    def run(spec: str, size: str) -> OnSmallDisk:
        folder, log, file = tmp_path / "disk", tmp_path / "log.txt", tmp_path / "spec.toml"
        folder.mkdir()
        file.write_text(spec)
        command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", MOUNTED, "sh"]
        command += [size, str(folder), *paceline.argv("run", file, "--out", folder / "run")]
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, env=paceline.environment, cwd=tmp_path,
                stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            )  # fmt: skip
        started.append(process)
        return OnSmallDisk(process, folder, log)

    yield run
    for process in started:
        if process.poll() is None:
            process.kill()
            process.wait(timeout=30)


def test_disk_that_fills_while_a_rank_trains_ends_the_run(start) -> None:
    """Then neither steps nor the sample log, the status or the outcome can be written."""
    run = start(ENDLESS, "8m")
    wait_for(lambda: running_rank(run.run_dir, "local", 0), STARTED_WITHIN_S, "rank 0 training")
    run.fill()
    code, output = run.end()
    assert code == 3, output
    assert "No space left on device" in output
    assert "Traceback" not in output
    assert alive(run.folder) == {}


def test_disk_without_room_for_the_first_file_is_reported_before_a_trial(start) -> None:
    run = start(SMALL, "4k")
    code, output = run.end()
    assert code == 3, output
    assert "No space left on device" in output
    assert f"paceline: {run.folder}/run/" in output, "the file is named"
    assert "Traceback" not in output
