"""Flat frames of what a run recorded."""

from __future__ import annotations

import polars as pl
import pytest
from tests.unit.analysis import fabricate, operations

from paceline.show.export.run_data import RunData, flat, joined, row_frame


def test_nested_values_get_names_with_dots():
    nested = {"a": {"b": {"c": 1}, "d": [1, 2]}, "e": None, "f": {}}
    assert flat(nested) == {"a.b.c": 1, "a.d": [1, 2], "e": None}


def test_a_value_that_one_row_lacks_is_null_in_its_parts():
    rows = [{"name": "x", "speedup": {"estimate": 2.0}}, {"name": "y", "speedup": None}]
    frame = row_frame(rows)
    assert frame.to_dict(as_series=False) == {"name": ["x", "y"], "speedup.estimate": [2.0, None]}


def test_a_value_that_all_rows_lack_is_one_column():
    assert row_frame([{"failed": None}]).to_dict(as_series=False) == {"failed": [None]}


def test_joined_frames_have_the_columns_of_all():
    frames = [pl.DataFrame({"a": [1]}), pl.DataFrame(), pl.DataFrame({"a": [2.5], "b": ["x"]})]
    assert joined(frames).to_dict(as_series=False) == {"a": [1.0, 2.5], "b": [None, "x"]}
    assert joined([]).is_empty()


def test_operations_have_names_and_times(run, alone, pair):
    frame = run.communication(pair)
    assert len(frame) == 2 * 2 * fabricate.Case().steps  # ranks, buckets, steps
    assert set(frame["operation"]) == {"allreduce"}
    assert set(frame["algorithm"]) == {"ring"}
    assert frame["sent_bytes"].null_count() == len(frame)  # the transport did not count
    first = frame.filter(rank=1, payload_bytes=operations.FIRST_BYTES)
    assert first["step"].to_list() == list(range(fabricate.Case().steps))
    # rank 1 is the last to ask, so it does not wait
    assert first["transfer_s"].to_list() == pytest.approx([operations.FIRST_S] * len(first))
    assert run.communication(alone).is_empty()


def test_rows_of_trials_name_trial_and_repeat(run, pair):
    steps = run.steps(pair)
    assert steps.columns[:3] == ["trial", "configuration", "repeat"]
    assert set(steps["trial"]) == {pair}
    assert set(steps["repeat"]) == {0}
    assert set(steps["rank"]) == {0, 1}


def test_evaluations_have_a_row_for_each_metric(tmp_path):
    case = fabricate.Case(evaluate_every_steps=6)
    run = RunData(fabricate.make_run(tmp_path / "run", [fabricate.SEQUENTIAL], cases=[case]))
    found = run.evaluations()
    assert found["metric"].to_list() == ["loss", "loss", "accuracy", "accuracy"]
    assert found["steps"].to_list() == [6, 12, 6, 12]
    assert found["samples"].to_list() == [48, 96, 48, 96]
    assert found["value"].to_list() == pytest.approx([1.08, 0.96, 0.45, 0.9])
    assert found["training_s"].to_list()[:2] == pytest.approx([6 * 0.635, 12 * 0.635], rel=1e-5)
    assert found["trial"].n_unique() == 1


def test_runs_without_evaluations_have_no_rows_of_them(run):
    assert run.evaluations().is_empty()
