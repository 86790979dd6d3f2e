"""Export to experiment trackers, TensorBoard and MLflow: parameters, tags and curves of trials."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from paceline.analysis.trial.reading import TrialRecord
from paceline.analysis.trial.steps import global_steps, read_steps
from paceline.export.frames import flat, host_frame
from paceline.export.run_data import RunData, require
from paceline.records.phases import STEP_PHASES
from paceline.report.document import render
from paceline.report.verdict import comparison_document, verdict_sentence

_NO_PARAMETERS = {"id", "experiment", "schema_version", "telemetry", "limits"}
_NO_TAGS = {"spec_toml", "trials", "packages"}  # too long for a tag; a tracker gets the manifest
_OF_A_HOST = (
    "cpu_busy_percent",
    "cpu_idle_percent",
    "cpu_iowait_percent",
    "ram_percent",
    "run_cpu_percent",
    "run_threads",
    "run_rss_bytes",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A value of a curve; step is the global step, or the number of the sidecar's sample."""

    name: str
    step: int
    unix_s: float
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedTrial:
    """One trial.

    parameters: the planned trial, flat. metrics: the numbers of its configuration's row, empty if
    it has not finished. points: curves over the global steps and over the sidecar's samples.
    """

    record: TrialRecord
    parameters: dict[str, Any]
    metrics: dict[str, float]
    points: list[Point]

    @property
    def id(self) -> str:
        return self.record.trial.id


def tracked_trials(run: RunData, trial: str | None) -> Iterator[TrackedTrial]:
    """Yield the trials of a run, one at a time. trial: only the one with this id."""
    rows = {row["configuration"]: row for row in run.rows()}
    for record in run.chosen(trial):
        values = record.trial.model_dump(mode="json", exclude=_NO_PARAMETERS)
        row = rows.get(record.trial.configuration, {}) if record.finished else {}
        yield TrackedTrial(
            record=record,
            parameters={name: value for name, value in flat(values).items() if value is not None},
            metrics=_numbers(row, record),
            points=[*_step_points(record), *_host_points(record)],
        )


def run_tags(run: RunData) -> dict[str, str]:
    """Return the manifest as texts: when and where it ran, versions, commit."""
    facts = {k: v for k, v in run.comparison.manifest.items() if k not in _NO_TAGS}
    known = {k: v for k, v in flat(facts).items() if v is not None and not isinstance(v, list)}
    return {name: str(value) for name, value in known.items()}


def write_tensorboard(run: RunData, out: Path, trial: str | None) -> list[Path]:
    """Write a folder of event files for each trial; replace earlier ones.

    They have curves, parameters with results (tab HPARAMS), and texts. Raises EnvironmentLacks
    without the library.
    """
    require("tensorboard", "tensorboard")
    from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415  (imports the extra)

    lines = "\n".join(f"- {name}: {text}" for name, text in run_tags(run).items())
    written = []
    for tracked in tracked_trials(run, trial):
        folder = out / tracked.id
        for old in folder.glob("events.out.tfevents.*"):
            old.unlink()
        values = {
            name: value if isinstance(value, bool | int | float | str) else str(value)
            for name, value in tracked.parameters.items()
        }
        with SummaryWriter(str(folder)) as writer:
            for point in tracked.points:
                writer.add_scalar(point.name, point.value, point.step, point.unix_s)
            writer.add_hparams(values, tracked.metrics, run_name=".")
            writer.add_text("run", lines)
            writer.add_text("command", f"    {(tracked.record.command or '').strip()}")
        written.append(folder)
    return written


def _numbers(row: Mapping[str, Any], record: TrialRecord) -> dict[str, float]:
    """Return what was measured; counts that are parameters of the trial are left out."""
    planned = set(flat(record.trial.placement.model_dump()))
    return {
        name: float(value)
        for name, value in flat(row).items()
        if isinstance(value, int | float) and not isinstance(value, bool) and name not in planned
    }


def _step_points(record: TrialRecord) -> Iterator[Point]:
    """Yield loss and speed of each global step, and its phases as the mean over the ranks."""
    ranks = read_steps(record)
    steps = global_steps(record, ranks)
    common = np.isin(ranks.step, steps.step)
    # NaN where no rank has the phase
    phases = {f"phase_s/{name}": _mean(ranks[f"{name}_s"][:, common]) for name in STEP_PHASES}
    rate = "samples_per_s" if steps.samples_known else "steps_per_s"
    frame = pl.DataFrame(
        {
            "step": steps.step,
            "unix_s": steps.ended_unix_s,
            "loss": steps.loss,
            "step_time_s": steps.time_s,
            rate: steps.samples / steps.time_s,
            **phases,
        },
        nan_to_null=True,
    )
    for name in frame.columns[2:]:
        for step, unix_s, value in frame.select("step", "unix_s", name).iter_rows():
            if value is not None:
                yield Point(name=name, step=step, unix_s=unix_s, value=value)


def _mean(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the mean over the ranks that have a value, shape (steps,); NaN where none has."""
    known = np.count_nonzero(~np.isnan(values), axis=0)
    return np.where(known > 0, np.nansum(values, axis=0) / np.maximum(known, 1), np.nan)


def _host_points(record: TrialRecord) -> Iterator[Point]:
    trace = host_frame(record)
    if trace.is_empty():
        return
    for (host,), samples in trace.group_by("host", maintain_order=True):
        for name in _OF_A_HOST:
            curve = samples.select("unix_s", value=pl.col(name).cast(pl.Float64))
            for number, (unix_s, value) in enumerate(curve.iter_rows()):
                if value is not None:
                    yield Point(name=f"{host}/{name}", step=number, unix_s=unix_s, value=value)


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

        record, outcome = tracked.record, tracked.record.outcome
        own = {**tags, "configuration": record.trial.configuration}
        launched_s = 0.0 if outcome is None else outcome.launched_unix_s
        run_id = self.start(key, tracked.id, launched_s, own)
        parameters = [Param(name, str(value)) for name, value in tracked.parameters.items()]
        for part in _parts(parameters, _MOST_PARAMETERS):
            self._client.log_batch(run_id, params=part)
        ended_s = 0.0 if outcome is None else outcome.ended_unix_s
        metrics = [Metric(n, v, round(1000 * ended_s), 0) for n, v in tracked.metrics.items()]
        metrics += [Metric(p.name, p.value, round(1000 * p.unix_s), p.step) for p in tracked.points]
        for part in _parts(metrics, _MOST_METRICS):
            self._client.log_batch(run_id, metrics=part)
        if record.command is not None:
            self.log_text(run_id, record.command, "command.txt")
        status = "RUNNING" if outcome is None else outcome.status
        self.end(run_id, _STATES.get(status, "FAILED"), ended_s)

    def end(self, run_id: str, state: str, unix_s: float) -> None:
        self._client.set_terminated(run_id, state, round(1000 * unix_s))


def _parts(entries: Sequence[Any], most: int) -> Iterator[Sequence[Any]]:
    return (entries[start : start + most] for start in range(0, len(entries), most))
