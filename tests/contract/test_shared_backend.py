"""Back end "paceline" in plain scripts."""

from __future__ import annotations

import os
import re
import signal
import time

import pytest
from tests.support.shared_backend import RANKS, Script

pytestmark = pytest.mark.contract

NOTICED_S = 5.0  # it takes a quarter of a second on idle cores


def test_three_scripts_on_one_host_do_not_mix_and_a_dead_rank_is_named(forks, tmp_path):
    steps = {"one": 60, "two": 60, "lost": 1_000_000}
    scripts = {name: Script(forks.python, tmp_path / name, n) for name, n in steps.items()}
    try:
        os.kill(scripts["lost"].wait_until_running()[2], signal.SIGKILL)
        killed_unix_s = time.time()
        for name in ("one", "two"):
            for outcome in map(scripts[name].outcome, range(RANKS)):
                assert (outcome["wrong"], outcome["error"]) == (0, "")
                assert outcome["threads"] == ["MainThread"]
                assert not [name for name in outcome["descriptors"] if "memfd" in name]
        for outcome in map(scripts["lost"].outcome, (0, 1)):
            assert outcome["error"] == "PeerLost"
            assert re.search(r"\brank 2 (\(process|has)", outcome["message"]), outcome
            assert outcome["ended_unix_s"] - killed_unix_s < NOTICED_S
        assert scripts["lost"].outcome(2) == {}
    finally:
        for script in scripts.values():
            script.end()
