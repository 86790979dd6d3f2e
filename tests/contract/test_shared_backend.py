"""Back end "paceline" in plain scripts: processes that nothing but a file has brought together."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.contract

PROGRAM = Path(__file__).parent / "programs" / "shared_backend.py"
LIMIT_S = 90
RANKS = 3
NOTICED_S = 5.0  # it takes a quarter of a second on idle cores


@pytest.fixture
def start(forks, tmp_path):
    """start(name, steps): the processes of a script by rank, and its folder."""
    started = []

    def start(name, steps):
        folder = tmp_path / name
        folder.mkdir()
        processes = [
            subprocess.Popen([*map(str, forks.python), PROGRAM, folder, *map(str, numbers)])
            for numbers in ((rank, RANKS, steps) for rank in range(RANKS))
        ]
        started.extend(processes)
        return processes, folder

    yield start
    for process in started:
        process.kill()
        process.wait()


def _wait_for_ranks(folder):
    deadline = time.monotonic() + LIMIT_S
    while len(list(folder.glob("*.ready"))) < RANKS:
        assert time.monotonic() < deadline, "the ranks did not start"
        time.sleep(0.05)


def _outcome(folder, rank):
    return json.loads((folder / f"{rank}.json").read_text())


def test_three_scripts_on_one_host_do_not_mix_and_a_dead_rank_is_named(start):
    (first, one), (second, two), (broken, lost) = (
        start("one", 60), start("two", 60), start("lost", 1_000_000),
    )  # fmt: skip
    _wait_for_ranks(lost)
    os.kill(int((lost / "2.ready").read_text()), signal.SIGKILL)
    killed_unix_s = time.time()
    for process in [*first, *second, broken[0], broken[1]]:
        process.wait(LIMIT_S)

    for folder in (one, two):
        for rank in range(RANKS):
            outcome = _outcome(folder, rank)
            assert (outcome["wrong"], outcome["error"]) == (0, "")
            assert outcome["threads"] == ["MainThread"]
            assert not [name for name in outcome["descriptors"] if "memfd" in name]
    for rank in (0, 1):
        outcome = _outcome(lost, rank)
        assert outcome["error"] == "PeerLost"
        assert "2" in outcome["message"]
        assert outcome["ended_unix_s"] - killed_unix_s < NOTICED_S
    assert not (lost / "2.json").exists()
