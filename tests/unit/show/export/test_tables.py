"""CSV and Parquet contain the same numbers as the frames."""

from __future__ import annotations

import json

import polars as pl
import pytest
from tests.unit.analysis import fabricate

from paceline.base.errors import UsageError
from paceline.show.export.run_data import RunData


def test_parquet_files_are_the_frames(run):
    written = run.export("parquet")
    assert {path.name for path in written} == {
        "rows.parquet",
        "steps.parquet",
        "communication.parquet",
        "host_trace.parquet",
    }  # no rank was sampled
    assert all(path.parent == run.files.root / "export/parquet" for path in written)
    frames = {"rows": run.to_polars(), "steps": run.steps(), "communication": run.communication()}
    for name, frame in frames.items():
        assert pl.read_parquet(run.files.export / f"parquet/{name}.parquet").equals(frame)


def test_csv_files_have_the_same_values(run, tmp_path):
    run.export("csv", tmp_path / "new/out")
    rows = pl.read_csv(tmp_path / "new/out/rows.csv")
    expected = run.to_polars()
    assert rows.columns == expected.columns
    assert rows["speedup.low"].to_list() == expected["speedup.low"].to_list()
    assert [json.loads(text) for text in rows["notes"]] == expected["notes"].to_list()
    steps = pl.read_csv(tmp_path / "new/out/steps.csv")
    assert steps["step_s"].to_list() == run.steps()["step_s"].to_list()


def test_one_trial_alone(run, alone, tmp_path):
    written = run.export("csv", tmp_path / "out", alone)
    assert {path.stem for path in written} == {"rows", "steps", "host_trace"}
    assert set(pl.read_csv(tmp_path / "out/steps.csv")["trial"]) == {alone}
    assert len(pl.read_csv(tmp_path / "out/rows.csv")) == 1


def test_points_of_a_weak_scaling_are_rows(tmp_path):
    files = fabricate.make_weak_scaling(tmp_path / "run", fabricate.scaled_way())
    run = RunData(files)
    run.export("csv", tmp_path / "out")
    found = pl.read_csv(tmp_path / "out/weak_scaling.csv")
    assert found["replicas"].to_list() == [1, 2]
    assert found["global_batch"].to_list() == [8, 16]
    assert found["workload"].to_list() == ["tiny", "tiny"]
    assert found["efficiency.estimate"][1] == pytest.approx(0.635 / 0.665, rel=0.01)
    one = next(r.trial.id for r in run.trials if r.trial.launcher == "mpi")
    run.export("csv", tmp_path / "one", one)
    assert pl.read_csv(tmp_path / "one/weak_scaling.csv")["replicas"].to_list() == [2]


def test_perfetto_has_a_trace_of_each_trial(run, alone, pair, tmp_path):
    written = run.export("perfetto", tmp_path / "out")
    assert {path.name for path in written} == {f"{alone}.json", f"{pair}.json"}
    events = json.loads((tmp_path / f"out/{pair}.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1}
    assert [p.name for p in run.export("perfetto", tmp_path / "one", pair)] == [f"{pair}.json"]


def test_unknown_format_trial_and_folder_are_refused(run, tmp_path):
    with pytest.raises(UsageError, match=r"expected a format among csv, parquet, .*, got 'xml'"):
        run.export("xml")
    with pytest.raises(UsageError, match="no trial 'x'"):
        run.export("csv", tmp_path / "out", "x")
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="expected a folder that can be written, got: File exists"):
        run.export("csv", tmp_path / "file")
