"""A run as data: its rows as flat Polars frames, and their export for other tools.

A nested value has a column for each of its parts, named with a dot: `speedup.estimate`,
`cpu_seconds.user`. Frames of trials begin with the columns trial, configuration and repeat.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import polars as pl

from paceline.analysis.compare.run import Comparison, compare_run
from paceline.analysis.trial.communication import clock_errors, load_operations, operation_times
from paceline.analysis.trial.evaluation import read_evaluations
from paceline.analysis.trial.host_frames import HostSeries, read_series
from paceline.analysis.trial.reading import TrialRecord, load_run, load_shares, load_trial
from paceline.analysis.trial.steps import global_steps, read_steps
from paceline.base.errors import DataError, EnvironmentLacks, NotComparable, UsageError
from paceline.base.host.own_runs import check_own_run
from paceline.base.host.programs import how_to_install
from paceline.measure.records.layout import RunFiles
from paceline.plan.spec.extensions import load_object
from paceline.plan.trials.trial import is_built_in

_OF_AN_OPERATION = (
    "rank", "step", "group", "operation", "algorithm", "ranks", "sequence", "payload_bytes",
    "sent_bytes", "sent_messages", "asked_s", "turn_s", "ended_s", "time_s", "wait_s",
    "transfer_s", "exposed_s", "overlapped_s", "last_rank",
)  # fmt: skip


def row_frame(rows: Iterable[Mapping[str, Any]]) -> pl.DataFrame:
    """Return the rows of `paceline compare --json` (schema 2) as a frame."""
    flat_rows = [flat(row) for row in rows]
    names = {name for row in flat_rows for name in row}
    # a value that is null in one row and nested in another has columns for its parts only
    parents = {name[:dot] for name in names for dot in range(len(name)) if name[dot] == "."}
    kept = [{name: v for name, v in row.items() if name not in parents} for row in flat_rows]
    return pl.DataFrame(kept, infer_schema_length=None, strict=False)


def step_frame(record: TrialRecord) -> pl.DataFrame:
    """Return the steps of all ranks of a trial, by step and rank; see `analysis.steps`."""
    steps = read_steps(record)
    frames = [
        steps.of_rank(rank).select(
            pl.lit(rank, dtype=pl.Int64).alias("rank"),
            pl.lit(stage, dtype=pl.Int64).alias("stage"),
            pl.all(),
        )
        for rank, stage in zip(steps.ranks, steps.stages.tolist(), strict=True)
    ]
    table = joined(frames)
    return table if table.is_empty() else _of_trial(record, table.sort("step", "rank"))


def evaluation_frame(record: TrialRecord) -> pl.DataFrame:
    """Return the metrics of each evaluation of a trial; see `analysis.evaluation`."""
    found = read_evaluations(record, global_steps(record))
    if found is None:
        return pl.DataFrame()
    names = ("steps", "epoch", "samples", "training_s", "wall_s", "epochs")
    places = {name: getattr(found, name) for name in names}
    table = pl.concat(
        pl.DataFrame({**places, "metric": [name] * len(values), "value": values})
        for name, values in found.metrics.items()
    )
    return _of_trial(record, table)


def communication_frame(record: TrialRecord) -> pl.DataFrame:
    """Return the operations of all ranks of a trial, by rank and turn; see `analysis.operations`.

    asked_s, turn_s and ended_s are unix seconds on rank 0's clock. time_s is wait_s plus
    transfer_s. step is null outside of steps.
    """
    if not record.ranks:
        return pl.DataFrame()
    operations = load_operations(record)
    times = operation_times(read_steps(record), operations, clock_errors(record, operations))
    return _of_trial(record, times.select(_OF_AN_OPERATION))


def host_frame(record: TrialRecord) -> pl.DataFrame:
    """Return the traces of all hosts of a trial with shares and rates; see `host_frames`."""
    return _of_hosts(record, lambda series: series.frame)


def rank_frame(record: TrialRecord) -> pl.DataFrame:
    """Return the traces of all ranks of a trial with their CPU shares."""
    return _of_hosts(record, lambda series: series.ranks)


# The frames of a trial by the names of their files.
TRIAL_FRAMES = {
    "steps": step_frame,
    "evaluations": evaluation_frame,
    "communication": communication_frame,
    "host_trace": host_frame,
    "rank_trace": rank_frame,
}


def joined(frames: Iterable[pl.DataFrame]) -> pl.DataFrame:
    """Put frames below one another; a column that one of them lacks is null there."""
    known = [frame for frame in frames if not frame.is_empty()]
    return pl.concat(known, how="diagonal_relaxed") if known else pl.DataFrame()


def flat(document: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Turn `{"speedup": {"low": 1.0}}` into `{"speedup.low": 1.0}`; lists are not changed."""
    found: dict[str, Any] = {}
    for name, value in document.items():
        if isinstance(value, dict):
            found |= flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found


def _of_hosts(record: TrialRecord, part: Callable[[HostSeries], pl.DataFrame]) -> pl.DataFrame:
    frames = [
        _unnested(frame).insert_column(0, pl.lit(series.host).alias("host"))
        for series in read_series(record.files)
        if not (frame := part(series)).is_empty()
    ]
    return _of_trial(record, joined(frames))


def _of_trial(record: TrialRecord, frame: pl.DataFrame) -> pl.DataFrame:
    if frame.is_empty():
        return pl.DataFrame()
    trial = record.trial
    return frame.select(
        pl.lit(trial.id).alias("trial"),
        pl.lit(trial.configuration).alias("configuration"),
        pl.lit(trial.repeat, dtype=pl.Int64).alias("repeat"),
        pl.all(),
    )


def _unnested(frame: pl.DataFrame) -> pl.DataFrame:
    """Replace every struct, also nested ones, by a column for each of its fields."""
    while structs := [n for n, kind in frame.schema.items() if isinstance(kind, pl.Struct)]:
        named = [
            pl.col(name).struct.rename_fields([f"{name}.{f}" for f in frame[name].struct.fields])
            for name in structs
        ]
        frame = frame.with_columns(named).unnest(structs)
    return frame


# The contents of a run directory. Each part is read and computed once, when it is first used

# Writes a run, or one trial of it, into a folder; returns what it has written.
Exporter = Callable[["RunData", Path, str | None], Sequence[Path]]


class RunData:
    """A run directory as values and data frames.

    baseline: shell pattern of the configurations that speedups are relative to; see `compare_run`.
    Raises DataError if the directory contains no trial.
    """

    def __init__(self, run: RunFiles | str | Path, baseline: str | None = None) -> None:
        self.files = run if isinstance(run, RunFiles) else RunFiles(Path(run))
        if not any(self.files.trials()):
            raise DataError(
                f"{self.files.root}: expected a run directory (with trials/*/trial.json), found "
                "none; `paceline run` makes one and prints its name"
            )
        self._baseline = baseline

    @cached_property
    def trials(self) -> tuple[TrialRecord, ...]:
        """All trials in the order of the plan, also failed and unfinished ones.

        Raises DataError if a file is damaged.
        """
        return tuple(load_run(self.files))

    @cached_property
    def comparison(self) -> Comparison:
        """All results of the analysis. Without a finished baseline, there is no speedup.

        Raises NotComparable if no trial has finished, UsageError if no configuration matches the
        baseline, DataError if a file is damaged.
        """
        return compare_run(self.files, baseline=self._baseline)

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows of `paceline compare --json`, one for each configuration."""
        found: list[dict[str, Any]] = self.comparison.to_json()["rows"]
        return found

    def to_polars(self) -> pl.DataFrame:
        """Return the same rows as a frame; nested values have columns like `speedup.estimate`."""
        return row_frame(self.rows())

    def steps(self, trial: str | None = None) -> pl.DataFrame:
        """Return every step of every rank. trial: only the trial with this id."""
        return self.frame("steps", trial)

    def evaluations(self, trial: str | None = None) -> pl.DataFrame:
        """Return every metric of every evaluation, with the steps, samples and training time
        before it."""
        return self.frame("evaluations", trial)

    def communication(self, trial: str | None = None) -> pl.DataFrame:
        """Return every communication operation of every rank, with its waiting and transfer."""
        return self.frame("communication", trial)

    def trace(self, trial: str | None = None) -> pl.DataFrame:
        """Return the sidecars' samples of every host, with shares and rates."""
        return self.frame("host_trace", trial)

    def rank_trace(self, trial: str | None = None) -> pl.DataFrame:
        """Return the sidecars' samples of every rank's processes."""
        return self.frame("rank_trace", trial)

    def export(
        self,
        to: str,
        out: str | Path | None = None,
        trial: str | None = None,
        *,
        trust_run: bool = False,
    ) -> list[Path]:
        """Write the run in a format of `paceline export`; return the files or folders.

        out: a folder; default RUN_DIR/export/FORMAT. trial: only the trial with this id. trust_run:
        ONNX may run tasks of a run that this user did not make.
        Raises UsageError for an unknown format or trial, for a run that would have to be trusted,
        or if `out` cannot be made; OSError if a file in it cannot be written; EnvironmentLacks if
        the format's library is not installed; DataError if a file is damaged.
        """
        if to not in _EXPORTERS:
            raise UsageError(f"export: expected a format among {', '.join(FORMATS)}, got {to!r}")
        if to in _RUN_TASKS and not trust_run:
            self._check_tasks(trial)
        exporter: Exporter = load_object(_EXPORTERS[to])
        folder = self.files.export / to if out is None else Path(out)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(
                f"{folder}: expected a folder that can be written, got: {error.strerror or error}; "
                "choose another with --out"
            ) from error
        return list(exporter(self, folder, trial))

    def _check_tasks(self, trial: str | None) -> None:
        """Raise UsageError if tasks that are not Paceline's belong to a run of somebody else."""
        tasks = {record.trial.training.task for record in self.chosen(trial)}
        others = sorted(task for task in tasks if task and not is_built_in(task))
        if others:
            check_own_run(self.files.root, f"the task {others[0]}")

    def chosen(self, trial: str | None) -> tuple[TrialRecord, ...]:
        """Return the trial with this id; None returns all. Raises UsageError if there is none."""
        if trial is None:
            return self.trials
        names = [name for name, _ in self.files.trials()]
        if trial not in names:
            raise UsageError(f"{self.files.root}: no trial {trial!r}; there are {', '.join(names)}")
        return (load_trial(self.files.trial(trial)),)

    def frame(self, name: str, trial: str | None = None) -> pl.DataFrame:
        """Return a frame of TRIAL_FRAMES over the trials, or of one of them."""
        return joined(TRIAL_FRAMES[name](record) for record in self.chosen(trial))


def finished_trials(runs: Sequence[RunData]) -> list[TrialRecord]:
    """Return the finished trials of runs, and of the shares that `paceline predict` has measured.

    Raises NotComparable if there are none.
    """
    found = [trial for run in runs for trial in run.trials if trial.finished]
    found += [trial for run in runs for trial in load_shares(run.files)]
    if not found:
        names = ", ".join(str(run.files.root) for run in runs)
        raise NotComparable(f"{names}: expected finished trials to predict from, found none")
    return found


# Imported on use: a format may need a library that is not installed.
_EXPORTERS = {
    "csv": "paceline.show.export.run_data:write_csv",
    "parquet": "paceline.show.export.run_data:write_parquet",
    "perfetto": "paceline.show.export.trace:write_perfetto",
    "openmetrics": "paceline.show.export.openmetrics:write_run",
    "onnx": "paceline.show.export.onnx:write_onnx",
}
_RUN_TASKS = ("onnx",)  # formats whose export runs the task of a trial
FORMATS = tuple(_EXPORTERS)


def require(extra: str, *modules: str) -> None:
    """Raise EnvironmentLacks with the command to install unless all `modules` are installed."""
    missing = [name for name in modules if find_spec(name) is None]
    if missing:
        raise EnvironmentLacks(
            f"export to {extra}: expected the packages {', '.join(modules)}, not installed: "
            f"{', '.join(missing)}; `{how_to_install(extra)}` brings them"
        )


# --- export to CSV and Parquet: a file for each frame that is not empty --------------------------


def write_csv(run: RunData, out: Path, trial: str | None) -> list[Path]:
    """Write a CSV file for each frame that is not empty; lists within a cell are JSON."""
    return [_written(out / f"{n}.csv", as_csv(f).write_csv) for n, f in _frames(run, trial)]


def write_parquet(run: RunData, out: Path, trial: str | None) -> list[Path]:
    """Write a Parquet file for each frame that is not empty."""
    return [_written(out / f"{n}.parquet", f.write_parquet) for n, f in _frames(run, trial)]


def _frames(run: RunData, trial: str | None) -> Iterator[tuple[str, pl.DataFrame]]:
    found = {"rows": run.to_polars(), "weak_scaling": _scaling_frame(run.comparison)}
    if trial is not None:
        (record,) = run.chosen(trial)
        is_wanted = pl.col("configuration") == record.trial.configuration
        found = {name: f if f.is_empty() else f.filter(is_wanted) for name, f in found.items()}
    found |= {name: run.frame(name, trial) for name in TRIAL_FRAMES}
    yield from ((name, frame) for name, frame in found.items() if not frame.is_empty())


def _scaling_frame(comparison: Comparison) -> pl.DataFrame:
    """Return a row for each number of replicas of each strategy; empty without weak scaling."""
    return row_frame(
        {**{key: value for key, value in each.items() if key != "points"}, **point}
        for each in comparison.to_json()["weak_scaling"]
        for point in each["points"]
    )


def _written(path: Path, write: Callable[[Path], object]) -> Path:
    """Write a file that appears complete or not at all, and follow no link in its place."""
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
        temporary = Path(folder, path.name)
        write(temporary)
        return temporary.replace(path)


# A spreadsheet takes a cell that begins with one of these for a formula, also in quotation marks.
_FORMULA = r"^[=+\-@\t\r]"


def as_csv(frame: pl.DataFrame) -> pl.DataFrame:
    """Replace lists, which CSV does not have, by JSON text; begin texts that a spreadsheet would
    compute with an apostrophe."""
    lists = [name for name, kind in frame.schema.items() if isinstance(kind, pl.List)]
    texts = [name for name, kind in frame.schema.items() if kind == pl.String]
    return frame.with_columns(
        *(
            pl.Series(name, [None if v is None else json.dumps(v) for v in frame[name].to_list()])
            for name in lists
        ),
        *(
            pl.when(pl.col(name).str.contains(_FORMULA))
            .then("'" + pl.col(name))
            .otherwise(pl.col(name))
            .alias(name)
            for name in texts
        ),
    )
