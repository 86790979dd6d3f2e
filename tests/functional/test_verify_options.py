"""Options of `paceline verify` that make a script equal to its reference without an edit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.functional.cli_runs import cli_in

pytestmark = [pytest.mark.functional, pytest.mark.timeout(200)]

SCRIPT = Path(__file__).parent / "programs/equal.py"
PAIRS = Path(__file__).parents[2] / "python/benchmarks/pairs"
SHARE = "--share=--batch-size=16"
EQUAL = ("--seed", "1", "--no-dropout", SHARE)
START = ("--same-start", "--no-dropout", SHARE)


@pytest.fixture
def paceline(cache, forks, tmp_path):
    return cli_in(cache, tmp_path, forks)


def verified(paceline, *words):
    """Return the exit code, and what is shown of each layout by its last argument."""
    options = ("--json", "-q", "--out", "run", "--launcher", "local")
    finished = paceline.main("verify", *options, *words)
    assert finished.stdout, finished.stderr
    layouts = json.loads(finished.stdout)["layouts"]
    return finished.returncode, {"".join(e["trial"]["arguments"][-1:]): e for e in layouts}


def statements(layouts):
    return {argument: each["shown"]["statement"] for argument, each in layouts.items()}


def test_random_numbers_and_a_batch_per_rank_are_made_equal_to_one_process(paceline):
    code, layouts = verified(paceline, *EQUAL, "--vary=--way=broadcast,sum", SCRIPT)
    assert statements(layouts) == {"--way=broadcast": 1, "--way=sum": 5}, layouts
    assert code == 9
    shown = layouts["--way=broadcast"]["shown"]
    assert shown["options"] == "--seed 1 --no-dropout --share --batch-size=16"


def test_a_seed_does_not_hide_a_missing_broadcast(paceline):
    code, layouts = verified(paceline, *EQUAL, SCRIPT, "--way", "seedless")
    [layout] = layouts.values()
    assert layout["finding"]["passed"] is True, layout
    assert (code, layout["shown"]["statement"]) == (9, 5)


def test_every_layout_starts_with_the_weights_of_the_reference(paceline):
    right, wrong = ("broadcast", "ddp", "fsdp", "fsdp1"), ("sum", "seedless")
    vary = f"--vary=--way={','.join(right + wrong)}"
    code, layouts = verified(paceline, *START, vary, SCRIPT)
    expected = {f"--way={way}": 1 if way in right else 5 for way in right + wrong}
    assert statements(layouts) == expected, layouts
    assert code == 9


def test_layouts_are_compared_with_several_ranks_of_the_script(paceline):
    """Each rank has its own dropout, which only as many ranks can have."""
    options = ("--reference-ranks=2", "--same-start", "--vary=--way=fsdp,sum")
    code, layouts = verified(paceline, *options, SCRIPT)
    assert statements(layouts) == {"--way=fsdp": 2, "--way=sum": 5}, layouts
    assert code == 9
    found = layouts["--way=fsdp"]
    assert (found["finding"]["passed"], found["finding"]["reference"]) == (True, "2 ranks")
    assert any("equal to 2 ranks" in each["reason"] for each in found["shown"]["findings"])


def test_a_reference_whose_ranks_are_wrong_is_no_reference(paceline):
    options = ("--reference-ranks=4", SHARE, "--same-start", "--no-dropout")
    code, layouts = verified(paceline, *options, SCRIPT, "--way", "sum")
    [layout] = layouts.values()
    assert (code, layout["finding"]["passed"]) == (9, None), layout
    assert "4 ranks train wrong themselves" in layout["finding"]["reason"]


def test_without_options_those_that_would_help_are_named(paceline):
    def sentences(*words):
        finished = paceline.main("verify", "-q", "--launcher", "local", *words)
        assert finished.returncode == 0, finished.stdout
        return finished.stdout

    assert "To compare more, try --seed 1." in sentences("--out", "a", SCRIPT)
    refusing = sentences("--out", "b", SCRIPT, "--way", "refusing")
    assert "To compare more, try --reference-ranks N." in refusing


def test_a_finding_is_accepted_by_the_name_that_the_verdict_suggests(paceline):
    vary = "--vary=--way=sum-of-rows,sum"
    script = SCRIPT.with_name("statements.py")
    code, layouts = verified(paceline, "--accept=total-weight", vary, script)
    assert statements(layouts) == {"--way=sum-of-rows": 2, "--way=sum": 5}, layouts
    shown = layouts["--way=sum-of-rows"]["shown"]
    assert (code, shown["options"]) == (9, "--accept total-weight")


def test_a_fault_of_the_last_step_is_found(paceline):
    vary = "--vary=--way=mean,own-rows,sum-at-the-end"
    script = SCRIPT.with_name("statements.py")
    code, layouts = verified(paceline, "--steps", "first:2,last:2", vary, script)
    expected = {"--way=mean": 1, "--way=own-rows": 2, "--way=sum-at-the-end": 5}
    assert statements(layouts) == expected, layouts
    found = [each["shown"] for each in layouts.values()]
    assert {(each["steps"], each["last"]) for each in found} == {(2, 2)}
    fault = layouts["--way=sum-at-the-end"]["shown"]["findings"][0]
    assert (code, fault["step"]) == (9, 5)
    assert "summed over 2 ranks" in fault["reason"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--share=--batch-size=9"], "expected a number that 2 ranks divide"),
        (["--share=--batch-size=8", "--reference-ranks=3"], "that 3 ranks divide"),
        (["--accept=batch-norm,anything"], "anything: expected batch-norm, running-statistics"),
        (["--resume-with=", "--same-start"], "expected no option that makes a script equal"),
        (["--steps=last:2"], "expected N, or first:N,last:M"),
    ],
)
def test_wrong_options_are_refused(paceline, options, expected):
    finished = paceline.main("verify", *options, SCRIPT)
    assert finished.returncode == 2
    assert expected in finished.stderr


@pytest.mark.parametrize(
    ("kind", "bug", "right", "wrong"),
    [
        ("data", "own-moments", 1, 3),
        ("sample_weights", "last-batch", 1, 5),
        ("exchange", "total-with-dropout", 2, 5),
        ("sharding", "lost-broadcast", 1, 5),  # weights are sent after each step
    ],
)
def test_odd_scripts_get_their_statement_beside_wrong_twins(paceline, kind, bug, right, wrong):
    script = PAIRS / f"{kind}.py"
    _, layouts = verified(paceline, "--vary=--fixed=yes,no", script, "--bug", bug)
    expected = {"--fixed=yes": right, "--fixed=no": wrong}
    assert statements(layouts) == expected, layouts
