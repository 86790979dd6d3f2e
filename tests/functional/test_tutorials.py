"""The tutorial on a training of your own, followed literally: its files saved, its commands run."""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
from pathlib import Path

import pytest
from tests.functional.cli_runs import Cli
from tests.support.commands import run_command

pytestmark = [pytest.mark.functional, pytest.mark.timeout(400)]

BENCHMARKS = Path(__file__).parents[2] / "python/benchmarks"


def test_the_tutorial_on_a_training_of_your_own(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    tutorial = importlib.import_module("own_training")  # it follows the same page
    text = tutorial.TUTORIAL.read_text()
    files = dict(tutorial.FILE.findall(text))
    assert set(files) == {"locate.py", "locate.toml", "everything.py"}
    assert len(files["locate.py"].splitlines()) <= 60
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    environment = {
        **os.environ, "PACELINE_CACHE": str(tmp_path / "cache"), "NO_COLOR": "1",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }  # fmt: skip
    commands = "\n".join(tutorial.COMMANDS.findall(text))
    done = run_command(["bash", "-euc", commands], 300, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "picture:\n    codec: array\n    dtype: float32\n    shape: [1, 16, 16]" in done.stdout
    assert re.search(r"^18 trials of ", done.stdout, re.MULTILINE)
    compared = Cli(environment, tmp_path).main("compare", "runs/locate", "--json")
    rows = json.loads(compared.stdout)["rows"]
    assert {row["local_strategy"]: row["equivalent"] for row in rows} == {
        "sequential": True,
        "processes": True,
    }
