"""`paceline verify --resume-with` on six kinds of right and six kinds of wrong resumes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tests.functional.cli_runs import cli_in

pytestmark = [pytest.mark.functional, pytest.mark.timeout(400)]

SCRIPT = Path(__file__).parents[2] / "python/benchmarks/pairs/resume.py"
RIGHT = ("--fixed",)


@pytest.fixture
def paceline(cache, forks, tmp_path):
    return cli_in(cache, tmp_path, forks)


def resumed(paceline, bug, *words, ranks=1, options=()):
    """Return the exit code and the finding of one verification."""
    launcher = ("--launcher", "local") if ranks > 1 else ()
    finished = paceline.main(
        "verify", "--json", "-q", "--out", "run", "--ranks", str(ranks), *launcher,
        "--resume-with", "--resume last.pt", "--stop-after", "8", *options,
        SCRIPT, "--bug", bug, *words,
    )  # fmt: skip
    assert finished.stdout, finished.stderr
    return finished.returncode, json.loads(finished.stdout)["finding"]


@pytest.mark.parametrize(
    ("bug", "ranks"),
    [
        ("samples", 1),
        ("schedule", 2),
        ("generator", 2),
        ("scaler", 1),
        ("epoch", 2),
        ("averages", 1),
    ],
)
def test_a_right_resume_is_equal(paceline, bug, ranks, tmp_path):
    code, found = resumed(paceline, bug, *RIGHT, ranks=ranks)
    assert (code, found["passed"]) == (0, True), found
    assert found["reasons"] == ["4 steps after step 8 agree"]
    assert not (tmp_path / "run/work").exists()


@pytest.mark.parametrize(
    ("bug", "ranks", "cause"),
    [
        ("samples", 2, "samples repeated: step 9 trains on those of step 7"),
        ("schedule", 1, "schedule restarted: learning rate 0.01 instead of"),
        ("moments", 2, "moments lost"),
        ("generator", 2, "generator not restored: torch"),
        ("scaler", 1, "the gradient scaler is new"),
        ("weights", 1, "the weights are older: those after step 4"),
    ],
)
def test_the_cause_of_a_wrong_resume_is_named(paceline, bug, ranks, cause):
    code, found = resumed(paceline, bug, ranks=ranks)
    assert (code, found["passed"], found["step"]) == (9, False, 8), found
    assert found["reasons"][0].startswith(cause), found


def test_averaged_weights_that_are_not_restored_are_found(paceline):
    code, found = resumed(paceline, "averages")
    assert (code, found["step"]) == (9, 8)
    assert "averaged weights" in found["reasons"][0]


def test_an_order_that_repeats_from_the_next_epoch_on_is_found(paceline):
    options = ("--stop-after", "2")  # an epoch has 6 steps
    code, found = resumed(paceline, "epoch", options=(*options, "--steps", "2"))
    assert (code, found["step"]) == (0, None)
    code, found = resumed(paceline, "epoch", options=(*options, "--out", "later"))
    assert (code, found["step"]) == (9, 6)
    assert found["reasons"][0] == "samples repeated: step 7 trains on those of step 1"


def test_a_resume_from_an_older_checkpoint_is_right_with_a_remark(paceline):
    options = ("--resume-with", "--resume previous.pt")
    code, found = resumed(paceline, "schedule", *RIGHT, options=options)
    assert (code, found["passed"], found["saved_after"]) == (0, True, 4), found
    assert "it continues after step 4: 4 steps" in found["reasons"][-1]


def test_another_number_of_ranks(paceline):
    options = ("--resume-ranks", "1")
    code, found = resumed(paceline, "samples", *RIGHT, ranks=2, options=options)
    assert (code, found["passed"]) == (0, True), found
    code, found = resumed(
        paceline, "averages", *RIGHT, ranks=2, options=(*options, "--out", "norm")
    )
    assert (code, found["passed"]) == (7, None), found
    assert "batch normalisation" in found["reasons"][0]


def test_the_script_stops_by_an_option_of_its_own(paceline):
    options = ("--stop-with", "--steps 4")
    code, found = resumed(paceline, "schedule", *RIGHT, options=options)
    assert (code, found["saved_after"]) == (0, 4), found


def test_without_a_checkpoint_nothing_is_shown(paceline):
    code, found = resumed(paceline, "samples", *RIGHT, "--every", "99")
    assert (code, found["passed"]) == (7, None)
    assert "no checkpoint in" in found["reasons"][0]


def test_a_script_that_resumes_by_itself(paceline, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.read_text().replace(
        "    options = parser.parse_args()\n",
        "    options = parser.parse_args()\n"
        "    if LAST.exists():\n        options.resume = LAST\n",
    ))  # fmt: skip
    shutil.copy(SCRIPT.with_name("utils.py"), tmp_path)
    words = ("--bug", "samples", "--fixed")
    finished = paceline.main(
        "verify", "--json", "-q", "--out", "run", "--ranks", "1", "--resume-with", "", script,
        *words,
    )  # fmt: skip
    assert json.loads(finished.stdout)["finding"]["passed"] is True, finished.stdout
    assert not (tmp_path / "last.pt").exists()
