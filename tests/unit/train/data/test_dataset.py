"""Opening and inspecting a data set: what is missing or damaged is named, with the remedy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.base.errors import DataError, EnvironmentLacks, UsageError
from paceline.plan.spec.values import local_path
from paceline.train.data.dataset import inspect_dataset, open_dataset
from paceline.train.data.location import Location
from paceline.train.data.manifest import MANIFEST_NAME

A_FILE = {"path": "a.parquet", "row_group_rows": [6], "size_bytes": 9, "sha256": "0" * 64}


def test_a_whole_data_set_opens_from_path_and_url(uneven: Any) -> None:
    for name in (uneven.path, str(uneven.path), f"file://{uneven.path}".replace("%", "%25")):
        dataset = open_dataset(name)
        assert dataset.name == str(uneven.path)
        assert dataset.row_group_rows == (5, 3, 4, 1, 6, 4)
        assert (dataset.samples, dataset.classes) == (23, ("fire", "no_fire", "smoke"))


def test_no_file_of_the_data_set_is_opened_to_open_it(
    dataset_of_rows: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = dataset_of_rows(3, 3)
    monkeypatch.setattr(Location, "open", None)
    monkeypatch.setattr(Location, "blocks", None)
    for file in made.path.glob("*.parquet"):
        file.write_bytes(bytes(file.stat().st_size))  # it has no footer any more
    assert open_dataset(made.path).row_group_rows == (3, 3)


def test_only_one_rank_of_a_node_looks_at_all_files(
    dataset_of_rows: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = dataset_of_rows(3, 3)
    (made.path / "part-00001.parquet").unlink()
    with pytest.raises(DataError, match="part-00001"):
        open_dataset(made.path)
    monkeypatch.setattr(Location, "sizes", None)
    assert open_dataset(made.path, check_files=False).samples == 6


def test_a_missing_data_set_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentLacks, match="paceline data ingest"):
        open_dataset(tmp_path / "nothing")
    with pytest.raises(EnvironmentLacks, match=MANIFEST_NAME):
        open_dataset(tmp_path)


@pytest.mark.parametrize("name", ["/data/a#b", "/data/what?", "/data/a;b", "ftp://host/data"])
def test_a_path_that_petastorm_cannot_take_is_refused(name: str) -> None:
    with pytest.raises(UsageError):
        local_path(name)


def test_a_row_group_that_is_missing_truncated_or_changed_is_named(dataset_of_rows: Any) -> None:
    made = dataset_of_rows(3, 3)
    file = made.path / "part-00001.parquet"
    data = file.read_bytes()
    file.write_bytes(data[:-8] + b"\0" * 8)
    with pytest.raises(DataError, match=r"part-00001\.parquet: expected sha256"):
        inspect_dataset(made.path)
    file.write_bytes(data[:-1])
    with pytest.raises(DataError, match=rf"expected {len(data)} bytes, found {len(data) - 1}"):
        open_dataset(made.path)
    file.unlink()
    with pytest.raises(DataError, match="missing"):
        open_dataset(made.path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": 1}, "expected manifest schema 2, got 1: .* make it again with `paceline data"),
        ({"samples": 7}, "the same samples"),
        ({"classes": None}, "not a valid manifest .*: classes: "),
        ({"files": []}, "files: "),
        ({"unknown": 1}, "unknown: Extra inputs"),
        ({"files": [{**A_FILE, "path": "../elsewhere.parquet"}]}, "not a path within"),
        # copies of remote files are named by it
        ({"files": [{**A_FILE, "sha256": "../elsewhere"}]}, r"files\.0\.sha256: "),
    ],
)
def test_a_manifest_that_does_not_add_up_is_refused(dataset_of_rows, change, message) -> None:
    made = dataset_of_rows(3, 3)
    file = made.path / MANIFEST_NAME
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(DataError, match=message):
        open_dataset(made.path)


def test_inspect_gives_json_that_adds_up(uneven: Any) -> None:
    found = json.loads(json.dumps(inspect_dataset(uneven.path)))
    assert found["samples"] == 23 == sum(found["classes"].values())
    assert found["row_groups"] == 6
    assert found["row_group_rows"] == {"min": 1, "max": 6}
    assert found["size_bytes"] == sum(file.stat().st_size for file in uneven.path.glob("*.parquet"))
    assert found["checksums"] == "verified"
