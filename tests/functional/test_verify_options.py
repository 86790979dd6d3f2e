"""Options of `paceline verify` that make a script equal to one process without an edit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.functional.cli_runs import cli_in

pytestmark = [pytest.mark.functional, pytest.mark.timeout(200)]

SCRIPT = Path(__file__).parent / "programs/equal.py"
EQUAL = ("--seed", "1", "--no-dropout", "--share=--batch-size=16")


@pytest.fixture
def paceline(cache, forks, tmp_path):
    return cli_in(cache, tmp_path, forks)


def verified(paceline, *words):
    options = ("--json", "-q", "--out", "run", "--launcher", "local")
    finished = paceline.main("verify", *options, *words)
    assert finished.stdout, finished.stderr
    found = json.loads(finished.stdout)
    [layout] = found["layouts"]
    return finished.returncode, found["options"], layout


def test_random_numbers_and_a_batch_per_rank_are_made_equal_to_one_process(paceline):
    code, options, layout = verified(paceline, *EQUAL, SCRIPT)
    assert (code, layout["shown"]["statement"]) == (0, 1), layout
    assert options == "--seed 1 --no-dropout --share --batch-size=16"


def test_a_seed_does_not_hide_a_missing_broadcast(paceline):
    code, _, layout = verified(paceline, *EQUAL, SCRIPT, "--way", "seedless")
    assert layout["finding"]["passed"] is True, layout
    assert (code, layout["shown"]["statement"]) == (9, 5)


def test_without_options_one_that_would_help_is_named(paceline):
    finished = paceline.main("verify", "-q", "--out", "run", "--launcher", "local", SCRIPT)
    assert finished.returncode == 0, finished.stdout
    assert "To compare with one process, try --" in finished.stdout


def test_a_share_that_ranks_do_not_divide_is_refused(paceline):
    finished = paceline.main("verify", "--share=--batch-size=9", SCRIPT)
    assert finished.returncode == 2
    assert "expected a number that 2 ranks divide" in finished.stderr
