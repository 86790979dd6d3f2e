"""A row has parts in Python and is flat in JSON."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from tests.unit.analysis import fabricate

from paceline.analysis.compare.run import compare_run


def test_a_row_is_flat_in_json_and_no_part_hides_a_field_of_another(tmp_path: Path) -> None:
    (row,) = compare_run(fabricate.make_run(tmp_path, [fabricate.SEQUENTIAL])).rows
    parts = [getattr(row, field.name) for field in dataclasses.fields(row)]
    names = [len(dataclasses.fields(p)) if dataclasses.is_dataclass(p) else 1 for p in parts]
    document = row.to_json()
    assert len(document) == sum(names)
    assert document["cpu_percent"] == row.usage.cpu_percent
    assert document["speedup"] == row.speed.speedup
