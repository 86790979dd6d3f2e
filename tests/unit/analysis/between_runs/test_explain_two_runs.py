"""A configuration in two runs: parts, causes, what differs, and what is refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from tests.unit.analysis import fabricate
from tests.unit.analysis.ways import MPI, SEQUENTIAL, Way

from paceline.analysis.between_runs.two_runs import explain_runs
from paceline.analysis.compare.run import Comparison, compare_run
from paceline.base.errors import NotComparable, UsageError
from paceline.cli import main
from paceline.measure.records.layout import RunFiles

QUICK = dataclasses.replace(SEQUENTIAL, cpu_percent=50.0, full_trace=True)
LABELS = ("old", "new")


@pytest.fixture
def run(tmp_path: Path) -> Any:
    def make(name: str, *ways: Way, repeats: int = 4, **case: Any) -> Path:
        cases = [fabricate.Case(steps=20, warmup_steps=2, **case)]
        fabricate.make_run(tmp_path / name, ways, cases=cases, repeats=repeats, jitter=0.01)
        return tmp_path / name

    return make


def compared(path: Path) -> Comparison:
    return compare_run(RunFiles(path))


def test_a_change_between_two_runs_is_explained_without_pairs(run: Any) -> None:
    slow = dataclasses.replace(QUICK, data_wait_s=0.3)
    old, new = compared(run("old", QUICK, MPI)), compared(run("new", slow, MPI))
    found = explain_runs(old, new, LABELS)
    changed, same = found.explanations
    assert changed.slower == "tiny.local.none.sequential.n1r1t1.fp32 in new"
    assert changed.faster == "tiny.local.none.sequential.n1r1t1.fp32 in old"
    assert changed.repeats == 0
    assert changed.part("data_wait").difference_s.mean == pytest.approx(0.29, rel=0.03)
    assert [cause.name for cause in changed.causes] == ["slow_reader"]
    whole = changed.difference_s.mean
    parts = sum(part.difference_s.mean for part in changed.parts)
    assert parts == pytest.approx(whole, rel=1e-9)
    assert not same.is_significant
    assert found.differences == ()
    assert found.not_compared == ()


def test_what_differs_between_the_runs_is_named(run: Any) -> None:
    paths = run("old", QUICK), run("new", dataclasses.replace(QUICK, other_s=0.2))
    fabricate.edit_json(paths[1] / "manifest.json", versions={"paceline": "0.2.0", "torch": "3"})
    found = explain_runs(compared(paths[0]), compared(paths[1]), LABELS)
    (explanation,) = found.explanations
    assert explanation.causes == ()
    assert {d.name for d in found.differences} == {"torch", "pyspark"}


def test_other_work_is_refused_with_what_changed(run: Any) -> None:
    old, new = compared(run("old", QUICK)), compared(run("new", QUICK, global_batch=4))
    with pytest.raises(NotComparable, match="global_batch 4 instead of 8"):
        explain_runs(old, new, LABELS)
    with pytest.raises(NotComparable, match="expected a configuration that finished in both runs"):
        explain_runs(old, compared(run("third", MPI)), LABELS)
    with pytest.raises(UsageError, match="configuration of both runs"):
        explain_runs(old, new, LABELS, "*.spark.*")


def test_the_command_shows_both_runs_and_their_differences(run: Any, capsys: Any) -> None:
    slow = dataclasses.replace(QUICK, data_wait_s=0.3)
    old, new = str(run("old", QUICK, MPI)), str(run("new", slow, MPI))
    assert main(["explain", old, new]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "Steps in new compared with those in old" in out
    assert "slow reader" in out
    assert "Machine, packages, git commit and spec are equal." in out
    assert main(["explain", old, new, "--only", "*.sequential.*"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "sequential in new takes" in out
    assert "more per step than tiny: local · sequential in old" in out
    assert "No common repeat: drifts of the machine do not cancel." in out
    assert main(["explain", old, new, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["first"], document["second"]) == (old, new)
    assert (document["schema"], len(document["explanations"])) == (3, 2)


def test_two_runs_take_one_pattern_only(run: Any, capsys: Any) -> None:
    old, new = str(run("old", QUICK, repeats=1)), str(run("new", QUICK, repeats=1))
    assert main(["explain", old, new, "--pair", "a", "b"]) == 2
    assert "expected one run, got two" in capsys.readouterr().err
