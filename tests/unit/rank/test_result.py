"""Every kind of rank writes every field of the result, in one place."""

from __future__ import annotations

import ast
from dataclasses import fields
from pathlib import Path

import paceline
from paceline.records.rows import TrainingResult

PACKAGE = Path(paceline.__file__).parent
WRITERS = ["write_script_result", "write_task_result"]
CALLERS = {
    "rank/train.py": {"write_task_result"},
    "rank/rounds/train.py": {"write_task_result"},
    "rank/script/train.py": {"write_script_result"},
}


def calls_in(path: Path, names: set[str]) -> list[ast.Call]:
    calls = [node for node in ast.walk(ast.parse(path.read_text("utf-8")))
             if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]  # fmt: skip
    return [call for call in calls if call.func.id in names]


def test_results_are_made_in_one_module_with_every_field() -> None:
    made = {
        path.relative_to(PACKAGE).as_posix(): calls
        for path in PACKAGE.rglob("*.py")
        if (calls := calls_in(path, {"TrainingResult"}))
    }
    assert list(made) == ["rank/result.py"]
    expected = {field.name for field in fields(TrainingResult)}
    for call in made["rank/result.py"]:
        assert {keyword.arg for keyword in call.keywords} == expected


def test_every_kind_of_rank_uses_it() -> None:
    for path, writers in CALLERS.items():
        assert {call.func.id for call in calls_in(PACKAGE / path, set(WRITERS))} == writers
