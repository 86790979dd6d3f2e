"""`paceline verify --resume-with` on six kinds of right and six kinds of wrong resumes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.functional.cli_runs import cli_in

pytestmark = [pytest.mark.functional, pytest.mark.timeout(400)]

SCRIPT = Path(__file__).parent / "programs/resuming.py"
RESUME = "--resume ckpt.pt"


@pytest.fixture
def paceline(cache, forks, tmp_path):
    return cli_in(cache, tmp_path, forks)


def resumed(paceline, kind, *words, ranks=1, lose="nothing", options=()):
    """Return the exit code and the finding of one verification."""
    launcher = ("--launcher", "local") if ranks > 1 else ()
    finished = paceline.main(
        "verify", "--json", "-q", "--out", "run", "--ranks", str(ranks), *launcher,
        "--resume-with", f"{RESUME} --lose {lose}", "--stop-after", "4", *options,
        SCRIPT, "--kind", kind, *words,
    )  # fmt: skip
    assert finished.stdout, finished.stderr
    return finished.returncode, json.loads(finished.stdout)["finding"]


@pytest.mark.parametrize(
    ("kind", "ranks"),
    [("plain", 1), ("schedule", 2), ("dropout", 2), ("scaler", 1), ("sampler", 2), ("average", 1)],
)
def test_a_right_resume_is_equal(paceline, kind, ranks, tmp_path):
    code, found = resumed(paceline, kind, ranks=ranks)
    assert (code, found["passed"]) == (0, True), found
    assert found["reasons"] == ["4 steps after step 4 agree"]
    assert not (tmp_path / "run/work").exists()


@pytest.mark.parametrize(
    ("lose", "kind", "ranks", "cause"),
    [
        ("samples", "plain", 2, "samples repeated: step 5 trains on those of step 1"),
        ("schedule", "schedule", 1, "schedule restarted: learning rate 0.01 instead of"),
        ("moments", "plain", 2, "moments lost"),
        ("generator", "dropout", 2, "generator not restored: torch"),
        ("scaler", "scaler", 1, "the gradient scaler is new"),
        ("weights", "plain", 1, "the weights are older: those after step 2"),
    ],
)
def test_the_cause_of_a_wrong_resume_is_named(paceline, lose, kind, ranks, cause):
    code, found = resumed(paceline, kind, ranks=ranks, lose=lose)
    assert (code, found["passed"], found["step"]) == (9, False, 4), found
    assert found["reasons"][0].startswith(cause), found


def test_averaged_weights_that_are_not_restored_are_found(paceline):
    code, found = resumed(paceline, "average", lose="average")
    assert (code, found["step"]) == (9, 4)
    assert "averaged weights" in found["reasons"][0]


def test_an_order_that_repeats_from_the_next_epoch_on_is_found(paceline):
    code, found = resumed(paceline, "sampler", lose="epoch")  # an epoch has 12 steps
    assert (code, found["step"]) == (0, None)
    options = ("--stop-after", "10")
    code, found = resumed(paceline, "sampler", lose="epoch", options=(*options, "--out", "later"))
    assert (code, found["step"]) == (9, 12)
    assert found["reasons"][0] == "samples repeated: step 13 trains on those of step 1"


def test_a_resume_from_an_older_checkpoint_is_right_with_a_remark(paceline):
    options = ("--resume-with", "--resume older.pt")
    code, found = resumed(paceline, "schedule", options=options)
    assert (code, found["passed"], found["saved_after"]) == (0, True, 2), found
    assert "it continues after step 2: 2 steps" in found["reasons"][1]


def test_another_number_of_ranks(paceline):
    options = ("--resume-ranks", "1")
    code, found = resumed(paceline, "plain", "--share-batch", ranks=2, options=options)
    assert (code, found["passed"]) == (0, True), found
    code, found = resumed(
        paceline, "average", "--share-batch", ranks=2, options=(*options, "--out", "norm")
    )
    assert (code, found["passed"]) == (7, None), found
    assert "batch normalisation" in found["reasons"][0]


def test_the_script_stops_by_an_option_of_its_own(paceline):
    code, found = resumed(paceline, "schedule", options=("--stop-with", "--max-steps 4"))
    assert (code, found["saved_after"]) == (0, 4), found


def test_without_a_checkpoint_nothing_is_shown(paceline):
    code, found = resumed(paceline, "plain", "--every", "99")
    assert (code, found["passed"]) == (7, None)
    assert "no checkpoint in" in found["reasons"][0]


def test_a_script_that_resumes_by_itself(paceline, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.read_text().replace(
        "options = parser.parse_args()",
        "options = parser.parse_args()\n"
        "if Path('ckpt.pt').exists():\n    options.resume = Path('ckpt.pt')",
    ))  # fmt: skip
    finished = paceline.main(
        "verify", "--json", "-q", "--out", "run", "--ranks", "1", "--resume-with", "", script
    )
    assert json.loads(finished.stdout)["finding"]["passed"] is True, finished.stdout
    assert not (tmp_path / "ckpt.pt").exists()
