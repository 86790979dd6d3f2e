"""Trials that ran different versions of the user's code are named."""

from __future__ import annotations

from pathlib import Path

from tests.unit.analysis import fabricate

from paceline.analysis.compare.run import compare_run
from paceline.measure.records.files import write_json
from paceline.measure.records.layout import RunFiles, TrialFiles


def make_run(folder: Path) -> RunFiles:
    """Fabricate a run whose first and third trial have an older version of a file."""
    run = fabricate.make_run(folder, [fabricate.SEQUENTIAL, fabricate.MPI], repeats=3)
    for _, files in run.trials():
        is_old = files.root.name.endswith("r0") or (
            files.root.name.endswith("r1") and ".mpi." in files.root.name
        )
        write_sources(files, 0, "old" if is_old else "new")
    return run


def write_sources(files: TrialFiles, rank: int, sha256: str) -> None:
    file = {"path": "/project/train.py", "sha256": sha256}
    write_json(files.rank(rank).sources, {"files": {"train.py": file}})


def flags(run: RunFiles) -> list[str]:
    return [flag for flag in compare_run(run).flags if "train.py" in flag]


def test_configurations_of_an_older_version_are_named(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    sequential, mpi = (row.configuration for row in sorted(compare_run(run).rows, key=str))
    [flag] = flags(run)
    assert flag.startswith("train.py has changed during the run; measured with an older version: ")
    for name, count in ((sequential, 1), (mpi, 2)):
        assert f"{name} ({count} of 3 repeats)" in flag
    assert compare_run(run).manifest["sources"] == {"train.py": "new, old"}


def test_ranks_with_different_versions_are_named(tmp_path: Path) -> None:
    run = fabricate.make_run(tmp_path, [fabricate.MPI])
    [(name, files)] = run.trials()
    for rank, sha256 in enumerate(("one", "two")):
        write_sources(files, rank, sha256)
    assert flags(run) == [f"{name}: its ranks ran different versions of train.py"]


def test_one_version_has_no_flag(tmp_path: Path) -> None:
    run = fabricate.make_run(tmp_path, [fabricate.SEQUENTIAL, fabricate.MPI])
    for _, files in run.trials():
        write_sources(files, 0, "one")
    assert flags(run) == []
    assert (
        "sources" not in compare_run(fabricate.make_run(tmp_path / "b", [fabricate.MPI])).manifest
    )
