"""MLflow reads the export back. Needs the extra `mlflow`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.unit.analysis import fabricate

pytestmark = pytest.mark.needs("mlflow")


@pytest.fixture
def client(run, tmp_path):
    (database,) = run.export("mlflow", tmp_path / "store")
    assert database == tmp_path / "store/mlflow.db"
    import mlflow

    return mlflow.MlflowClient(f"sqlite:///{database}")


def _runs(client):
    (experiment,) = [e for e in client.search_experiments() if e.name == "fabricated"]
    return {run.info.run_name: run for run in client.search_runs([experiment.experiment_id])}


def test_parameters_metrics_and_tags_are_those_of_the_trials(run, client, pair):
    runs = _runs(client)
    assert set(runs) == {"fabricated", *(record.trial.id for record in run.trials)}
    trial = runs[pair]
    assert trial.data.params["training.global_batch"] == "8"
    expected = fabricate.SEQUENTIAL.step_s / fabricate.MPI.step_s
    assert trial.data.metrics["speedup.median"] == pytest.approx(expected)
    assert trial.data.tags["mlflow.parentRunId"] == runs["fabricated"].info.run_id
    assert trial.data.tags["versions.torch"] == "2.13.0"
    assert trial.data.tags["mlflow.source.git.commit"] == "abc123"
    assert trial.info.status == "FINISHED"
    assert trial.info.start_time >= 1000 * fabricate.LAUNCHED
    history = client.get_metric_history(trial.info.run_id, "loss")
    assert [m.step for m in history] == list(range(fabricate.Case().steps))


def test_report_and_comparison_are_artefacts(run, client, tmp_path):
    parent = _runs(client)["fabricated"]
    names = {each.path for each in client.list_artifacts(parent.info.run_id)}
    assert names == {"report.html", "comparison.json", "manifest.json"}
    path = client.download_artifacts(parent.info.run_id, "comparison.json", str(tmp_path))
    assert json.loads(Path(path).read_text("utf-8"))["rows"] == run.rows()
    assert "is fastest" in parent.data.tags["verdict.tiny"]


def test_a_second_export_replaces_the_first(run, client, tmp_path):
    run.export("mlflow", tmp_path / "store")
    assert len(_runs(client)) == 1 + len(run.trials)
