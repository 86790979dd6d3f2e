"""`paceline tune`: its spec comes from the command line, or from the directory of the search."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.base.errors import ExitCode
from paceline.base.host.own_runs import remember_run
from paceline.cli import main, tune
from paceline.measure.records.files import write_json
from paceline.measure.records.layout import RunFiles
from paceline.plan.spec.loading import shipped_experiments
from paceline.runner.tune.search import Findings


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Record the searches that are asked for, and make their files."""
    asked: list[dict[str, Any]] = []

    def search(spec: Any, run_dir: Path, **options: Any) -> Findings:
        del options["progress"]
        asked.append({"name": spec.experiment.name, "run_dir": run_dir, **options})
        write_json(RunFiles(run_dir).tuning, {"schema": 2, "found": []})
        write_json(RunFiles(run_dir).manifest, {"spec_toml": shipped_experiments()["quickstart"]})
        remember_run(run_dir)
        return Findings(found=())

    monkeypatch.setattr(tune, "tune_local", search)
    return asked


def test_search_is_continued_with_its_own_spec(
    searches: list[dict[str, Any]], tmp_path: Path, capsys: Any
) -> None:
    assert main(["tune", "local", "quickstart", "-o", str(tmp_path), "--limit", "9"]) == 0
    assert f"next: paceline run {tmp_path}/tuned.toml" in capsys.readouterr().out
    assert main(["tune", "local", "--resume", str(tmp_path), "--json"]) == 0
    assert capsys.readouterr().out == '{\n "schema": 2,\n "found": []\n}\n'
    common = {"name": "quickstart", "run_dir": tmp_path}
    assert searches == [
        {**common, "resume": False, "budget_s": 9.0},
        {**common, "resume": True, "budget_s": None},
    ]


@pytest.mark.parametrize("words", [[], ["quickstart", "--resume", "."]])
def test_spec_or_directory(
    searches: list[dict[str, Any]],
    capsys: Any,
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["tune", "local", *words]) == ExitCode.USAGE
    assert "expected SPEC, or --resume DIR" in capsys.readouterr().err
    assert searches == []


def test_interruption_says_how_to_go_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    def search(_: Any, run_dir: Path, **__: Any) -> Findings:
        write_json(RunFiles(run_dir).manifest, {})
        raise KeyboardInterrupt

    monkeypatch.setattr(tune, "tune_comm", search)
    assert main(["tune", "comm", "quickstart", "-o", str(tmp_path)]) == ExitCode.INTERRUPTED
    assert f"Continue with: paceline tune comm --resume {tmp_path}" in capsys.readouterr().err
