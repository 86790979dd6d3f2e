"""The report of transport and strategy: every documented key is read, and keys of extensions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.base.errors import DataError
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
