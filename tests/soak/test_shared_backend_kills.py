"""SIGKILL of any rank of a script over back end "paceline" at a random time, many times.

The other ranks name the one that was killed, within seconds, and nothing of the script is left.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import sys
import time
from pathlib import Path

import pytest
from tests.support.shared_backend import RANKS, Script

pytestmark = [pytest.mark.soak, pytest.mark.timeout(300)]

NOTICED_S = 5.0
LONGEST_RUN_S = 0.5  # of the script before the kill


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the file that gets one line for each kill."""
    return tmp_path_factory.getbasetemp() / "shared_backend_kills.jsonl"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make one test for each repetition."""
    first = metafunc.config.getoption("--soak-seed")
    metafunc.parametrize("seed", range(first, first + metafunc.config.getoption("--soak-count")))


def test_killed_rank_is_named(seed: int, tmp_path: Path, results: Path) -> None:
    chosen = random.Random(seed)
    killed = chosen.randrange(RANKS)
    script = Script([sys.executable], tmp_path / "script", 1_000_000)
    try:
        processes = script.wait_until_running()
        time.sleep(chosen.uniform(0, LONGEST_RUN_S))
        os.kill(processes[killed], signal.SIGKILL)
        killed_unix_s = time.time()
        others = [rank for rank in range(RANKS) if rank != killed]
        outcomes = [script.outcome(rank) for rank in others]
    finally:
        script.end()
    noticed_s = [outcome["ended_unix_s"] - killed_unix_s for outcome in outcomes]
    messages = [outcome["message"] for outcome in outcomes]
    with results.open("a") as file:
        print(json.dumps({"seed": seed, "killed": killed, "noticed_s": noticed_s}), file=file)
    assert [outcome["error"] for outcome in outcomes] == ["PeerLost"] * len(others)
    for message in messages:
        assert re.search(rf"\brank {killed} \(process \d+\) has died", message), message
    assert max(noticed_s) < NOTICED_S
    assert not [process for process in processes if Path(f"/proc/{process}").exists()]
