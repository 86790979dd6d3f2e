"""`paceline export` of a real run."""

from __future__ import annotations

import csv
import json

import pytest

pytestmark = pytest.mark.functional


def test_csv_has_the_rows_of_compare_and_the_steps(small_run, paceline, tmp_path):
    result = paceline.main("export", small_run, "--to", "csv", "-o", tmp_path / "out")
    assert result.returncode == 0, result.stderr
    names = ["rows", "steps", "host_trace", "rank_trace"]  # one rank does not communicate
    assert result.stdout.splitlines() == [str(tmp_path / f"out/{name}.csv") for name in names]
    (expected,) = json.loads(paceline.main("compare", small_run, "--json").stdout)["rows"]
    with (tmp_path / "out/rows.csv").open(encoding="utf-8") as file:
        (row,) = csv.DictReader(file)
    assert float(row["samples_per_s.estimate"]) == expected["samples_per_s"]["estimate"]
    assert row["configuration"] == expected["configuration"]
    with (tmp_path / "out/steps.csv").open(encoding="utf-8") as file:
        assert [int(step["step"]) for step in csv.DictReader(file)] == list(range(20))
