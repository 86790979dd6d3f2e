"""The benchmark of the analysis generates run directories that can be read."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

import pytest

from paceline.analysis.compare import compare_run
from paceline.records.layout import RunFiles

BENCHMARKS = Path(__file__).parents[2] / "python" / "benchmarks"


def test_generated_run_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    benchmark = importlib.import_module("analysis")
    run = RunFiles(tmp_path / "run")
    benchmark.generate(run, argparse.Namespace(configurations=3, repeats=2, steps=40))
    rows = compare_run(run).rows
    assert [row.repeats for row in rows] == [2, 2, 2]
    assert all(row.equivalent for row in rows)
