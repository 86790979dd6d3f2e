"""Comparisons of whole runs as text."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from tests.support.terminal import shown as text
from tests.unit.analysis import fabricate

from paceline.analysis.between_runs.speeds import read_reference, read_speeds, write_reference
from paceline.analysis.between_runs.two_runs import Difference, compare_runs, run_differences
from paceline.measure.records.files import write_json
from paceline.measure.records.layout import RunFiles
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
    assert [row.startswith("?") for row in rows[:2]] == [False, True]
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


def test_files_that_differ_are_named_first(tmp_path: Path) -> None:
    runs = [fabricate.make_run(tmp_path / name, [fabricate.SEQUENTIAL]) for name in "ab"]
    for run, sha256 in zip(runs, ("11" * 32, "22" * 32), strict=True):
        write_json(
            own_sources(run), {"files": {"train.py": {"path": "/train.py", "sha256": sha256}}}
        )
    before, after = (read_speeds(run) for run in runs)
    names = configuration_names(before.trials.values())
    differences = run_differences(before.manifest, after.manifest)
    lines = text(runs_view(compare_runs(before, after), differences, names)).splitlines()
    assert lines[0] == "train.py differs."
    assert ["file", "train.py", "1" * 12, "2" * 12] in [line.split() for line in lines]
    write_reference(tmp_path / "reference.json", before)
    kept = read_reference(tmp_path / "reference.json")
    assert run_differences(kept.manifest, after.manifest) == differences
    own_sources(runs[0]).unlink()  # as of an older version
    assert run_differences(read_speeds(runs[0]).manifest, after.manifest) == []


def own_sources(run: RunFiles) -> Path:
    [(_, files)] = run.trials()
    return files.rank(0).sources
