"""The contents of a run directory. Each part is read and computed once, when it is first used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import polars as pl

from paceline.analysis.compare.result import Comparison
from paceline.analysis.compare.run import compare_run
from paceline.analysis.trial.reading import TrialRecord, load_run, load_trial
from paceline.base.errors import DataError, EnvironmentLacks, NotComparable, UsageError
from paceline.base.host.programs import how_to_install
from paceline.measure.records.layout import RunFiles
from paceline.plan.spec.extensions import load_object
from paceline.show.export.frames import TRIAL_FRAMES, joined, row_frame

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
        """Return the same rows as a frame; nested values have columns such as `speedup.median`."""
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
        self, to: str, out: str | Path | None = None, trial: str | None = None
    ) -> list[Path]:
        """Write the run in a format of `paceline export`; return the files or folders.

        out: a folder; default RUN_DIR/export/FORMAT. trial: only the trial with this id.
        Raises UsageError for an unknown format or trial, or if `out` cannot be made; OSError if a
        file in it cannot be written; EnvironmentLacks if the format's library is not installed;
        DataError if a file is damaged.
        """
        if to not in _EXPORTERS:
            raise UsageError(f"export: expected a format among {', '.join(FORMATS)}, got {to!r}")
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
    begun = [path for run in runs for path in run.files.shares.glob("*/trials/*/trial.json")]
    shares = [RunData(path) for path in sorted({path.parents[2] for path in begun})]
    found = [trial for run in (*runs, *shares) for trial in run.trials if trial.finished]
    if not found:
        names = ", ".join(str(run.files.root) for run in runs)
        raise NotComparable(f"{names}: expected finished trials to predict from, found none")
    return found


# Imported on use: a format may need a library that is not installed.
_EXPORTERS = {
    "csv": "paceline.show.export.tables:write_csv",
    "parquet": "paceline.show.export.tables:write_parquet",
    "perfetto": "paceline.show.export.trace:write_perfetto",
    "openmetrics": "paceline.show.export.openmetrics:write_run",
    "onnx": "paceline.show.export.onnx:write_onnx",
}
FORMATS = tuple(_EXPORTERS)


def require(extra: str, *modules: str) -> None:
    """Raise EnvironmentLacks with the command to install unless all `modules` are installed."""
    missing = [name for name in modules if find_spec(name) is None]
    if missing:
        raise EnvironmentLacks(
            f"export to {extra}: expected the packages {', '.join(modules)}, not installed: "
            f"{', '.join(missing)}; `{how_to_install(extra)}` brings them"
        )
