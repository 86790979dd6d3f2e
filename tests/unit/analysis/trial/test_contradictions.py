"""Records that contradict each other are found; no run of Paceline's has any."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.unit.analysis import fabricate

from paceline.analysis.trial.contradictions import contradiction_in
from paceline.measure.records.layout import RunFiles, TrialFiles

RECORDED = Path(__file__).parents[3] / "functional/recorded_runs/0.3.0"


@pytest.mark.parametrize("name", sorted(path.name for path in RECORDED.glob("*/")))
def test_recorded_runs_have_none(name: str) -> None:
    assert contradiction_in(RunFiles(RECORDED / name)) is None


@pytest.fixture
def run(tmp_path: Path) -> RunFiles:
    return fabricate.make_run(tmp_path / "run", [fabricate.SEQUENTIAL, fabricate.MPI])


def twice(path: Path) -> None:
    path.write_bytes(2 * path.read_bytes())


def change(path: Path, **changes: object) -> None:
    fabricate.edit_rows(path, lambda row: row.update(changes))


DAMAGE: dict[str, Callable[[TrialFiles], object]] = {
    "expected each step once": lambda files: twice(files.rank(1).steps),
    "expected no negative samples": lambda files: change(files.rank(0).steps, samples=-1),
    "expected the ranks 0 to 1, found 7": lambda files: shutil.copytree(
        files.rank(0).root, files.rank(7).root
    ),
    "expected 2 ranks of a finished trial, found 1": lambda files: shutil.rmtree(
        files.rank(1).root
    ),
    "expected rank 0 of 2, got 1 of 2": lambda files: fabricate.edit_json(
        files.rank(0).environment, rank=1
    ),
    "expected the result of a finished trial": lambda files: files.result.unlink(),
    "expected the fields of": lambda files: fabricate.edit_json(files.outcome, status=3),
    "expected the id": lambda files: fabricate.edit_json(files.trial, id="another"),
    "expected that imports ends after its start": lambda files: change(
        files.rank(0).spans, ended_unix_s=1.0
    ),
}


@pytest.mark.parametrize("said", DAMAGE)
def test_damage_is_named_with_its_file(run: RunFiles, said: str) -> None:
    files, _ = fabricate.pair_of(run)
    assert contradiction_in(run) is None
    DAMAGE[said](files)
    found = contradiction_in(run)
    assert found is not None
    assert found.startswith(str(files.root))
    assert said in found
