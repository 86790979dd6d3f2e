"""A trial that is about to be ended writes a last checkpoint, if its rank 0 can."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from tests.support.running import running

from paceline.collectives.host import host_name
from paceline.measure.records.documents import CheckpointFolder
from paceline.measure.records.layout import TrialFiles
from paceline.runner.launchers.supervise import write_last_checkpoint

# Stands for rank 0: at the signal it writes its part of a checkpoint, or ends.
RANK = """
import signal, sys, time
from pathlib import Path
from paceline.measure.records.documents import CheckpointFolder

def write(*_):
    if sys.argv[2] == "ends":
        sys.exit(1)
    CheckpointFolder(Path(sys.argv[1])).write(40, 0, 1, lambda file: file.write(b"state"))

signal.signal(signal.SIGUSR1, write)
print("ready", flush=True)
while True:
    time.sleep(0.1)
"""


@pytest.fixture
def rank(files: TrialFiles, write_status: Callable[..., None]) -> Iterator[Callable[[str], None]]:
    """Start rank 0, which has trained a step."""
    with ExitStack() as stack:

        def start(behaviour: str) -> None:
            process = stack.enter_context(running(RANK, files.checkpoints, behaviour))
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            write_status(0, "running", host=host_name(), pid=process.pid)
            files.rank(0).steps.touch()

        yield start


def test_new_checkpoint_is_complete(files: TrialFiles, rank: Callable[[str], None]) -> None:
    rank("writes")
    assert write_last_checkpoint(files, limit_s=30)
    assert [found.steps for found in CheckpointFolder(files.checkpoints).complete()] == [40]
    assert not write_last_checkpoint(files, limit_s=0.3), "there is no newer one"


def test_rank_that_ends_is_not_waited_for(files: TrialFiles, rank: Callable[[str], None]) -> None:
    rank("ends")
    assert not write_last_checkpoint(files, limit_s=60)


def test_trial_without_a_rank_that_trains_has_nothing_to_write(files: TrialFiles) -> None:
    assert not write_last_checkpoint(files, limit_s=60)
