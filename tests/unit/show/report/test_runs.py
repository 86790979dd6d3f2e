"""Comparisons of whole runs as text."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from tests.support.terminal import shown as text
from tests.unit.analysis import fabricate

from paceline.analysis.between_runs.differences import Difference, run_differences
from paceline.analysis.between_runs.speeds import read_speeds
from paceline.analysis.between_runs.two_runs import compare_runs
from paceline.show.report.runs import configuration_names, runs_view


def test_two_runs_are_shown_with_their_differences_first(tmp_path) -> None:
    fast = dataclasses.replace(fabricate.MPI, forward_s=0.05, weights_error=1.0)
    first = fabricate.make_run(
        tmp_path / "a",
        [fabricate.SEQUENTIAL, fabricate.MPI, fabricate.SPARK],
        repeats=3,
        jitter=1e-3,
    )
    second = fabricate.make_run(
        tmp_path / "b", [fabricate.SEQUENTIAL, fast], repeats=3, jitter=1e-3
    )
    fabricate.edit_json(second.manifest, spec_toml='name = "b"\n')
    before, after = read_speeds(first), read_speeds(second)
    differences = run_differences(before.manifest, after.manifest)
    names = configuration_names((before.trials | after.trials).values())
    shown = text(runs_view(compare_runs(before, after), differences, names))
    lines = [" ".join(line.split()) for line in shown.splitlines()]
    assert lines[0] == "Differences between the runs"
    assert "spec name fabricated b" in lines
    sentence = "Of 2 configurations in both runs, the second run is faster in 1, slower in 0,"
    assert sentence in lines
    rows = [line for line in lines if line.endswith(("\N{MULTIPLICATION SIGN}1", "sequential"))]
    assert [row.startswith("≈") for row in rows[:2]] == [False, True]
    assert any(line.startswith("only in the first run: tiny: spark") for line in lines)
    assert any(line.startswith("? tiny: mpi") for line in lines)


def test_many_differences_of_a_kind_are_counted(tmp_path: Path) -> None:
    speeds = read_speeds(fabricate.make_run(tmp_path, [fabricate.SEQUENTIAL]))
    many = [Difference(of="package", name=f"p{n}", before="1", after="2") for n in range(15)]
    names = configuration_names(speeds.trials.values())
    shown = text(runs_view(compare_runs(speeds, speeds), many, names))
    assert "3 more, see --json" in shown
    assert "Of 1 configuration in both runs" in shown
    equal = text(runs_view(compare_runs(speeds, speeds), [], names))
    assert equal.startswith("Machine, packages, git commit and spec are equal.")
