"""Runs by time, and marks where the same spec on the same machine changed its speed."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from tests.unit.analysis import fabricate

from paceline.analysis.between_runs.history import find_runs, read_history
from paceline.analysis.compare.run import compare_run
from paceline.errors import PacelineWarning


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three runs of one spec, the last one slower under MPI, and a run of another spec."""
    root = tmp_path_factory.mktemp("runs")
    slow = dataclasses.replace(fabricate.MPI, forward_s=0.2)
    runs = {
        "c": (3.0, slow, {}),
        "a": (1.0, fabricate.MPI, {"git": {"commit": "0123456789", "has_local_changes": True}}),
        "deep/b": (2.0, fabricate.MPI, {}),
        "other": (2.5, slow, {"spec_toml": 'seed = 2\nname = "other"\n'}),
    }
    for name, (created, way, changes) in runs.items():
        run = fabricate.make_run(root / name, [fabricate.SEQUENTIAL, way], repeats=3, jitter=0.001)
        fabricate.edit_json(run.manifest, created_unix_s=created, **changes)
        compare_run(run)  # checks equivalence
    fabricate.make_run(root / "a" / "tune", [fabricate.SEQUENTIAL])
    return root


def test_runs_are_found_below_a_directory_without_searches_of_a_run(root: Path) -> None:
    found = [str(run.root.relative_to(root)) for run in find_runs(root)]
    assert sorted(found) == ["a", "c", "deep/b", "other"]
    assert [run.root for run in find_runs(root / "a")] == [root / "a"]


def test_runs_come_by_time_and_only_a_change_of_the_same_spec_is_marked(root: Path) -> None:
    runs = read_history(root)
    names = [run.path.removeprefix(f"{root}/") for run in runs]
    assert names == ["a", "deep/b", "other", "c"]
    assert [run.previous and run.previous.removeprefix(f"{root}/") for run in runs] == [
        None, "a", None, "deep/b",
    ]  # fmt: skip
    assert [[row.configuration.split(".")[1] for row in run.slower] for run in runs] == [
        [], [], [], ["mpi"],
    ]  # fmt: skip
    assert [run.faster for run in runs] == [()] * 4
    (row,) = runs[3].slower
    assert row.ratio.median == pytest.approx(0.345 / 0.445, rel=0.01)


def test_each_run_has_its_commit_and_its_fastest_configuration(root: Path) -> None:
    first = read_history(root)[0]
    assert (first.commit, first.has_local_changes) == ("0123456789", True)
    (best,) = first.best
    assert best.configuration.startswith("tiny.mpi.")
    assert best.samples_per_s.median == pytest.approx(8 / 0.345, rel=0.01)


def test_run_without_a_finished_trial_is_listed_and_not_compared_with(tmp_path: Path) -> None:
    for number, name in enumerate(("first", "broken", "last")):
        run = fabricate.make_run(tmp_path / name, [fabricate.SEQUENTIAL])
        fabricate.edit_json(run.manifest, created_unix_s=float(number))
        if name == "broken":
            for _, files in run.trials():
                fabricate.edit_json(files.outcome, status="failed")
    runs = read_history(tmp_path)
    assert [run.best for run in runs if run.path.endswith("broken")] == [()]
    assert runs[2].previous == str(tmp_path / "first")


def test_run_that_cannot_be_read_is_left_out_with_a_warning(tmp_path: Path) -> None:
    fabricate.make_run(tmp_path / "good", [fabricate.SEQUENTIAL])
    old = fabricate.make_run(tmp_path / "old", [fabricate.SEQUENTIAL])
    fabricate.edit_json(old.manifest, schema=1)
    with pytest.warns(PacelineWarning, match="left out: .*expected schema 2, got 1"):
        runs = read_history(tmp_path)
    assert [run.path for run in runs] == [str(tmp_path / "good")]
