"""The report of transport and strategy, with keys of extensions, and the last operations."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.base.errors import DataError
from paceline.measure.records.communication import LastOperation, OperationNotes, last_operations
from paceline.measure.records.files import document
from paceline.measure.records.rows import TrainingResult

REPORT = {
    "transport": "gloo",
    "library": "gloo",
    "sent_bytes_per_step": 7,
    "compression": {"method": "int8", "block": 64, "error_feedback": True},
    "split_points": [1, 3],
    "sufficient_factors": {},
    "of_an_extension": [1],
}


def read(folder: Path, report: object) -> TrainingResult | None:
    file = folder / "result.json"
    result = {"steps": 1, "weights_sha256": "a", "update_l2": {}, "parameters": 1}
    file.write_text(json.dumps({**result, "communication": report}))
    return document(file, TrainingResult)


def test_report_is_read_as_written(tmp_path: Path) -> None:
    result = read(tmp_path, REPORT)
    assert result.communication == REPORT


def test_report_with_a_wrong_type_is_a_data_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="split_points"):
        read(tmp_path, {"split_points": "one"})


# --- last operations ---


def test_last_operation_of_each_group_with_the_number_of_pending_ones(tmp_path):
    notes = OperationNotes(tmp_path / "operations.bin")
    notes.begun("world", "all_reduce", 0, 10.0)
    notes.begun("world", "broadcast", 1, 11.0)
    notes.begun("pipe", "send", 0, 12.0)
    notes.ended("world")
    notes.ended("pipe")
    assert last_operations(tmp_path / "operations.bin") == [
        LastOperation(
            group="world", operation="broadcast", sequence=1, pending=1, begun_unix_s=11.0
        ),
        LastOperation(group="pipe", operation="send", sequence=0, pending=0, begun_unix_s=12.0),
    ]
    notes.close()


def test_more_groups_than_the_file_has_room_for_are_left_out(tmp_path):
    notes = OperationNotes(tmp_path / "operations.bin")
    for number in range(40):
        notes.begun(f"group {number}", "all_reduce", 0, 1.0)
        notes.ended(f"group {number}")
    assert len(last_operations(tmp_path / "operations.bin")) == 32


def test_no_file_and_a_short_one_have_none(tmp_path):
    (tmp_path / "short").write_bytes(b"x" * 10)
    assert last_operations(tmp_path / "short") == []
    assert last_operations(tmp_path / "absent") == []
