"""Findings of `paceline doctor --master`; a program stands in for Spark's driver."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from paceline.base.host.programs import Tool
from paceline.runner.launchers.spark import launcher


@pytest.mark.parametrize(
    ("output", "ok", "found", "why"),
    [
        ("print('4')", True, "4 of 4", "free at spark://head:7077"),
        ("print('3')", False, "3 of 4", "more or bigger workers"),
        ("print('unknown')", True, "unknown of 4", "free at"),
        ("sys.exit('no master')", False, "not counted", "no master; look at the address"),
    ],
)
def test_free_slots_of_a_cluster_are_counted(monkeypatch, output, ok, found, why):
    run = launcher.subprocess.run

    def instead(argv, **options):
        assert argv[3:6] == ["paceline.runner.launchers.spark.slots", "spark://head:7077", "4"]
        return run([sys.executable, "-c", f"import sys; {output}"], **options)

    monkeypatch.setattr(launcher.subprocess, "run", instead)
    for finder in ("find_java", "find_spark"):
        monkeypatch.setattr(launcher, finder, lambda: Tool(path=Path("/none"), version="", why=""))
    [finding] = launcher.cluster_checks("spark://head:7077", 4)
    assert (finding.ok, finding.found) == (ok, found)
    assert why in finding.why
