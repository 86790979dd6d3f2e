"""A worker that raises or is killed ends the trial with its own error and leaves nothing."""

import json
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tests.functional.cli_runs import FAULTS
from tests.support.commands import start_command
from tests.support.environment import kept_environment
from tests.support.job_specs import NO_SIDECAR, job_words
from tests.support.waiting import pid_after_steps, wait_for

from paceline.base.host.processes import is_alive

pytestmark = [pytest.mark.functional, pytest.mark.timeout(200)]

STARTED_WITHIN_S = 90.0
GONE_WITHIN_S = 10.0  # what the project promises
OPEN_MPI_SEGMENT = "sm_segment."
LEFT_LIMIT_S = 5.0
# Long enough to be ended within; nothing waits for it to end.
ENDLESS = {
    "image_size": 64, "global_batch": 16, "epochs": 100_000, "max_steps": 100_000,
    "oversubscribe": True, "telemetry": NO_SIDECAR, "collective_s": 60.0,
}  # fmt: skip
STRATEGIES: dict[str, dict[str, Any]] = {
    "threads": {"replicas": 2},
    "processes": {"ranks_per_node": 2, "transport": "shared"},
    "pipeline": {"stages": 2, "micro_batches": 4, "balance": "size"},
    "hybrid": {"replicas": 2, "stages": 2, "micro_batches": 4, "balance": "size"},
}


class Training:
    """An endless training, started by hand, in a session of its own."""

    def __init__(self, strategy, dataset, folder, environment):
        self.out, self.log = folder / "run", folder / "log.txt"
        keys = {"local_strategy": strategy, "data": dataset, **STRATEGIES[strategy], **ENDLESS}
        argv = [sys.executable, "-m", "paceline.runner.launchers.local"]
        argv += [*job_words(folder, "local", **keys), "--out", self.out]
        environment = kept_environment(**environment)
        self.process = start_command(
            argv, self.log, env=environment, cwd=folder, start_new_session=True
        )

    def ranks(self):
        """Process ids of the ranks, once all of them have trained for a step."""
        folders = self.out.glob("trials/*/ranks/*")
        pids = {int(folder.name): pid_after_steps(folder) for folder in folders}
        return pids if all(pids.values()) else None

    def alive(self):
        """Processes of the session that have not ended."""
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(ProcessLookupError):
                if os.getsid(int(path.name)) == self.process.pid and is_alive(int(path.name)):
                    found.append(int(path.name))
        return found

    def end(self):
        for pid in self.alive():
            os.kill(pid, signal.SIGKILL)
        self.process.wait(timeout=30)


@pytest.fixture
def start(tiny_dataset, tmp_path):
    started = []

    def start_training(strategy, **environment):
        started.append(Training(strategy, tiny_dataset, tmp_path, environment))
        return started[-1]

    yield start_training
    for training in started:
        training.end()


def left_shared_memory():
    """Return the names of shared memory that no living process uses.

    Memory without a name goes with the last process that maps it. Segments of Open MPI, and
    folders, belong to tests that run at the same time: these trainings start no MPI and no Spark.
    """
    folder = Path("/dev/shm")
    names = {path.name for path in folder.iterdir() if path.is_file()}
    used = {words[-1] for maps in maps_of_all_processes() for words in maps}
    return {
        name
        for name in names
        if str(folder / name) not in used and not name.startswith(OPEN_MPI_SEGMENT)
    }


def maps_of_all_processes():
    """Yield the lines of each process's memory map that name a file, split into words."""
    for path in Path("/proc").glob("[0-9]*/maps"):
        try:
            lines = path.read_text().splitlines()
        except (OSError, UnicodeDecodeError):
            continue  # it has ended
        yield [words for line in lines if len(words := line.split(maxsplit=5)) == 6]


def assert_no_new_shared_memory(before):
    """Other tests may be about to map what they have made."""
    wait_for(lambda: left_shared_memory() <= before, LEFT_LIMIT_S, "no shared memory is left")


@pytest.mark.parametrize("strategy", ["threads", "pipeline"])
def test_worker_that_raises_ends_the_trial_with_its_error(start, strategy):
    before = left_shared_memory()
    fault = {"FAULT_THREAD": "1"} if strategy == "threads" else {"FAULT_RANK": "1"}
    training = start(strategy, PYTHONPATH=str(FAULTS), **fault)
    wait_for(lambda: "seeded fault" in training.log.read_text(), STARTED_WITHIN_S, "the fault")
    assert training.process.wait(timeout=GONE_WITHIN_S) == 5, training.log.read_text()
    assert training.alive() == []
    assert_no_new_shared_memory(before)
    (outcome,) = training.out.glob("trials/*/outcome.json")
    told = json.loads(outcome.read_text())
    assert told["status"] == "failed"
    assert told["failed_rank"] == (0 if strategy == "threads" else 1)
    assert "seeded fault" in told["message"]
    if strategy == "threads":
        assert "replica 1" in told["message"]


def test_killed_worker_ends_the_trial_and_is_named(start):
    """Ranks of `hybrid` wait for each other in both ways: in a pipeline and for their averages."""
    before = left_shared_memory()
    training = start("hybrid")
    ranks = wait_for(training.ranks, STARTED_WITHIN_S, "all ranks training")
    os.kill(ranks[1], signal.SIGKILL)
    assert training.process.wait(timeout=GONE_WITHIN_S) == 5, training.log.read_text()
    assert "rank 1" in training.log.read_text()
    assert training.alive() == []
    assert_no_new_shared_memory(before)


def test_killed_parent_leaves_no_process_and_no_shared_memory(start):
    before = left_shared_memory()
    training = start("processes")
    wait_for(training.ranks, STARTED_WITHIN_S, "all ranks training")
    training.process.kill()
    training.process.wait(timeout=GONE_WITHIN_S)
    wait_for(lambda: training.alive() == [], GONE_WITHIN_S, "every process gone")
    assert_no_new_shared_memory(before)
