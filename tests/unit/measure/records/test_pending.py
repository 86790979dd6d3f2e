"""The file of a rank's last operations."""

from __future__ import annotations

from paceline.measure.records.communication import LastOperation, OperationNotes, last_operations


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
