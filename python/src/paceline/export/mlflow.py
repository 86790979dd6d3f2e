"""Export to MLflow: a run for the whole comparison, with a nested run for each trial.

Everything is written to a database file and a folder of artefacts. No server is contacted.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.export.run_data import RunData, require
from paceline.export.tracking import TrackedTrial, run_tags, tracked_trials
from paceline.records.rows import Outcome
from paceline.report.document import render
from paceline.report.verdict import comparison_document, verdict_sentence

_KEY = "paceline.key"  # tag by which an earlier export of the same run or trial is found
_MOST_METRICS, _MOST_PARAMETERS = 1000, 100  # of one `log_batch` (MLflow's REST API, limits)
_MOST_CHARACTERS = 5000  # of a tag's value
_STATES = {"ok": "FINISHED", "interrupted": "KILLED"}


def write_mlflow(run: RunData, out: Path, trial: str | None) -> list[Path]:
    """Write parameters, metrics by step, tags, report and comparison into `out`/mlflow.db.

    An earlier export of the same run is replaced.
    Raises EnvironmentLacks without the library.
    """
    require("mlflow", "mlflow", "sqlalchemy", "alembic")
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # it would report to its makers
    comparison = run.comparison
    store = _Store(out, comparison.experiment)
    tags = run_tags(run)
    for workload in comparison.workloads:
        tags[f"verdict.{workload}"] = verdict_sentence(comparison, workload)
    if "git.commit" in tags:
        tags["mlflow.source.git.commit"] = tags["git.commit"]  # the tag that MLflow's pages show
    key = tags.get("created_unix_s", str(run.files.root.resolve()))
    outcomes = [record.outcome for record in run.trials if record.outcome is not None]
    began_s = min((outcome.launched_unix_s for outcome in outcomes), default=0.0)
    parent = store.start(key, comparison.experiment, began_s, tags)
    store.log_text(parent, render(comparison), "report.html")
    store.log_text(parent, json.dumps(comparison_document(comparison), indent=1), "comparison.json")
    store.log_text(parent, json.dumps(dict(comparison.manifest), indent=1), "manifest.json")
    for tracked in tracked_trials(run, trial):
        store.log_trial(f"{key}/{tracked.id}", tracked, {**tags, "mlflow.parentRunId": parent})
    ended_s = max((outcome.ended_unix_s for outcome in outcomes), default=began_s)
    store.end(parent, "FINISHED", ended_s)
    return [store.database]


class _Store:
    """An experiment in a database file, which is created if it does not exist."""

    def __init__(self, folder: Path, experiment: str) -> None:
        from mlflow import MlflowClient  # noqa: PLC0415  (the extra)

        root = folder.resolve()
        self.database = root / "mlflow.db"
        self._client = MlflowClient(tracking_uri=f"sqlite:///{self.database}")
        known = self._client.get_experiment_by_name(experiment)
        self._experiment: str = (
            self._client.create_experiment(experiment, (root / "artifacts").as_uri())
            if known is None
            else known.experiment_id
        )

    def start(self, key: str, name: str, unix_s: float, tags: Mapping[str, str]) -> str:
        """Create a run and return its id; delete the earlier one with this key."""
        same = f"tags.`{_KEY}` = '{key}'"
        for earlier in self._client.search_runs([self._experiment], same):
            self._client.delete_run(earlier.info.run_id)
        own = {_KEY: key, **{name: text[:_MOST_CHARACTERS] for name, text in tags.items()}}
        created = self._client.create_run(self._experiment, round(1000 * unix_s), own, name)
        run_id: str = created.info.run_id
        return run_id

    def log_text(self, run_id: str, text: str, name: str) -> None:
        self._client.log_text(run_id, text, name)

    def log_trial(self, key: str, tracked: TrackedTrial, tags: Mapping[str, str]) -> None:
        from mlflow.entities import Metric, Param  # noqa: PLC0415

        record = tracked.record
        own = {**tags, "configuration": record.trial.configuration}
        run_id = self.start(key, tracked.id, _launched_s(record.outcome), own)
        parameters = [Param(name, str(value)) for name, value in tracked.parameters.items()]
        for part in _parts(parameters, _MOST_PARAMETERS):
            self._client.log_batch(run_id, params=part)
        ended_s = _ended_s(record.outcome)
        metrics = [Metric(n, v, round(1000 * ended_s), 0) for n, v in tracked.metrics.items()]
        metrics += [Metric(p.name, p.value, round(1000 * p.unix_s), p.step) for p in tracked.points]
        for part in _parts(metrics, _MOST_METRICS):
            self._client.log_batch(run_id, metrics=part)
        if record.command is not None:
            self.log_text(run_id, record.command, "command.txt")
        status = "RUNNING" if record.outcome is None else record.outcome.status
        self.end(run_id, _STATES.get(status, "FAILED"), ended_s)

    def end(self, run_id: str, state: str, unix_s: float) -> None:
        self._client.set_terminated(run_id, state, round(1000 * unix_s))


def _launched_s(outcome: Outcome | None) -> float:
    return 0.0 if outcome is None else outcome.launched_unix_s


def _ended_s(outcome: Outcome | None) -> float:
    return 0.0 if outcome is None else outcome.ended_unix_s


def _parts(entries: Sequence[Any], most: int) -> Iterator[Sequence[Any]]:
    return (entries[start : start + most] for start in range(0, len(entries), most))
