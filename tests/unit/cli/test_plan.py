"""`paceline plan`: its table, its faults, and the same as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.specs import spec_text

from paceline.base.errors import ExitCode
from paceline.cli import main
from paceline.runner.trials import planning


def text_of(*, repeats: int | str, steps: int = 20, data: str = "samples = 64") -> str:
    return spec_text(
        'launcher = "torchrun"; transport = "gloo"; local_strategy = "processes"; replicas = 2',
        workload=f'name = "tiny"; {data}',
        tables=f"[training]; warmup_steps = 3; max_steps = {steps}",
        repeats=repeats,
    )


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    return tmp_path / "planned.toml"


def test_a_row_for_each_configuration_then_totals(spec: Path, output: Callable[..., str]) -> None:
    spec.write_text(text_of(repeats=2))
    shown = output("plan", spec)
    assert max(map(len, shown.splitlines())) <= 80
    lines = [line.rstrip() for line in shown.splitlines()]
    figures = r" +32 +20 \(3\) +2 +\S +\d+\.\d+"
    assert re.fullmatch(rf"local\.none\.sequential\.n1r1t1 +1{figures}", lines[2])
    assert re.fullmatch(rf"torchrun\.gloo\.processes\.n1r2t1 +2{figures}", lines[3])
    assert "for --only: tiny.local.none.sequential.n1r1t1.fp32" in shown
    assert re.search(r"4 trials of 2 configurations, \d+ MB on disk; duration unknown", shown)
    assert "disk: " in shown


def test_names_are_broken_after_a_dot_only(
    spec: Path, output: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "72")
    spec.write_text(text_of(repeats="auto"))
    lines = [line.rstrip() for line in output("plan", spec).splitlines()]
    first = next(line for line in lines if line.startswith("torchrun"))
    assert first.split()[0] == "torchrun.gloo."
    assert lines[lines.index(first) + 1] == "  processes.n1r2t1"
    assert "≤ 8" in first
    assert any(line.startswith("at most 16 trials") for line in lines)


def test_all_faults_follow_the_table(spec: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec.write_text(text_of(repeats=1, data='data = "nowhere"'))
    for options in ([], ["--json"]):
        assert main(["plan", str(spec), *options]) == ExitCode.USAGE
        shown = capsys.readouterr()
        assert "local.none.sequential" in shown.out
        assert shown.err.startswith("paceline: workload tiny: ")
        assert "nowhere" in shown.err
        assert "Traceback" not in shown.err


def test_json_has_the_same(spec: Path, output: Callable[..., str]) -> None:
    spec.write_text(text_of(repeats=2, steps=8))
    document = json.loads(output("plan", spec, "--json"))
    assert [row["ranks"] for row in document["configurations"]] == [1, 2]
    assert document["configurations"][0]["steps"] == 8
    assert len(document["trials"]) == 4
    assert any("torchrun" in trial["command"] for trial in document["trials"])
    assert (document["expected_s"], document["faults"]) == (None, [])
    assert "only 5 steps would be measured" in document["warnings"][0]
    assert document["disk_use"]["kept_bytes"] > 0


def test_what_the_cores_do_not_allow_is_shown_with_its_reason(
    spec: Path, output: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "usable_cores", lambda: 1)
    spec.write_text(text_of(repeats=2))
    reason = "tiny.torchrun.gloo.processes.n1r2t1.fp32: 2 ranks of 1 thread(s) need 2 cores"
    shown = output("plan", spec)
    assert f"left out: {reason}" in shown
    assert "2 trials of 1 configuration" in shown
    assert json.loads(output("plan", spec, "--json"))["left_out"][0].startswith(reason)
