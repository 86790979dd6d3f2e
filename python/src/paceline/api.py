"""Paceline from Python: plan and run an experiment, and read a run directory.

`import paceline` provides `Plan`, `run`, `load` and `Run`. The command line uses them, too.
All errors are those of `paceline.base.errors`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import plotly.graph_objects as go

from paceline.analysis.compare.run import explain_pair
from paceline.analysis.compare.verdict import Verdict
from paceline.analysis.explain.explanation import Explanation
from paceline.analysis.predict.exchange import requested_link
from paceline.analysis.predict.predict import predict
from paceline.analysis.predict.prediction import PredictionRequest, Predictions, Scaling
from paceline.base.errors import DataError, NotComparable, UsageError
from paceline.base.host.own_runs import THE_SPEC, check_own_run, odd_content
from paceline.measure.records.files import write_json, write_text
from paceline.measure.records.layout import MADE, RunFiles, TrialFiles
from paceline.measure.records.rows import Outcome
from paceline.plan.spec.loading import SpecSource, load_spec
from paceline.plan.spec.models import Experiment
from paceline.plan.trials.trial import Trial
from paceline.runner.launchers.base import launcher_for
from paceline.runner.trials import experiment
from paceline.runner.trials.directory import default_run_dir
from paceline.runner.trials.planning import Progress, plan
from paceline.runner.trials.preview import Preview, preview_run
from paceline.runner.tune.local import tune_and_run
from paceline.runner.tune.search import Findings
from paceline.show.export.run_data import RunData, finished_trials
from paceline.show.report.document import charts, render
from paceline.show.report.table import comparison_html, comparison_text
from paceline.show.report.verdict import comparison_document, with_sentences

if TYPE_CHECKING:
    import pandas as pd


__all__ = ["LineProgress", "Plan", "Run", "load", "run"]

StrPath = str | os.PathLike[str]


class Plan:
    """Every trial of a spec with its exact command. Runs nothing and writes nothing.

    spec: a TOML file, the name of a shipped experiment, a mapping with the content of such a file,
    or a `paceline.plan.spec.Experiment`.
    Raises UsageError with every fault of the spec, also for a spec with [tune] and
    local_strategy = "best": its trials are known after the search.
    """

    def __init__(self, spec: SpecSource) -> None:
        planned = plan(load_spec(spec))
        self._planned = planned
        # the name of a default run directory contains the time: all commands use one
        files = RunFiles(default_run_dir(planned.experiment.name))
        self._runs = files.root.parent
        self.experiment: Experiment = planned.experiment
        self.datasets: Mapping[str, str] = planned.datasets  # by workload; made by `run`
        self.trials: Sequence[Trial] = planned.trials
        self.commands: Mapping[str, str] = {  # by trial id, as shell lines
            trial.id: launcher_for(trial.launcher)
            .command(trial, files.trial(trial.id))
            .shell_line()
            for trial in planned.trials
        }

    @cached_property
    def preview(self) -> Preview:
        """Steps, duration, disk use, faults and warnings; takes 1 to 2 s for each model.

        The duration is that of the latest run of the same spec below runs/.
        """
        return preview_run(self._planned, self._runs)

    def __repr__(self) -> str:
        return f"<paceline.Plan of {self.experiment.name}: {len(self.trials)} trials>"


class Run(RunData):
    """A run directory: results as values, data frames, figures and files.

    Files are read when a result is first asked for, and kept; `load` the directory again while it
    grows.
    """

    def __init__(self, run_dir: StrPath, baseline: str | None = None) -> None:
        super().__init__(Path(run_dir), baseline)
        self.search: Findings | None = None  # of the [tune] search that `run` did before the trials
        self.failed: Sequence[Outcome] = ()  # of the trials that failed in `run`

    @property
    def path(self) -> Path:
        return self.files.root

    @property
    def verdicts(self) -> Mapping[str, Verdict]:
        """The fastest configuration of each workload, by how much, and why."""
        return with_sentences(self.comparison).verdicts

    @property
    def verdict(self) -> Verdict:
        """The verdict on the only workload. Raises UsageError if the run has several."""
        if len(self.verdicts) > 1:
            raise UsageError(
                f"{self.path}: expected one workload, the run has {', '.join(self.verdicts)}; use "
                "`verdicts`, which has a verdict for each"
            )
        return next(iter(self.verdicts.values()))

    def to_pandas(self) -> pd.DataFrame:
        """Return the rows as a pandas frame."""
        return self.to_polars().to_pandas()

    def explain(self, first: str, second: str) -> Explanation:
        """Split the difference in step time of two configurations into parts, with causes.

        first, second: names, or shell patterns that match one configuration each.
        Raises UsageError if a pattern matches none or several.
        """
        return explain_pair(self.comparison, first, second)

    def predict(  # noqa: PLR0913  (the options of `paceline predict`)
        self,
        nodes: Sequence[int] = (1, 2, 4, 8),
        *,
        link: str | None = None,
        latency_s: float | None = None,
        strategies: Sequence[str] = (),
        transports: Sequence[str] = (),
        scaling: Scaling = "strong",
        global_batch: int | None = None,
        micro_batches: int | None = None,
    ) -> Predictions:
        """Predict step times of configurations that were not run: `predictions`, `refusals`.

        link: rate between nodes, as in "10gbit"; None takes the measured one. latency_s: of that
        link. strategies: shell patterns; none takes all. transports: none takes those of the run.
        global_batch, micro_batches: None takes those of the run.
        Raises UsageError for a rate, transport or number of nodes that there is not, NotComparable
        if no trial is finished.
        """
        if any(each < 1 for each in nodes):
            raise UsageError(f"nodes: expected numbers of at least 1, got {list(nodes)}")
        request = PredictionRequest(
            nodes=tuple(sorted(set(nodes))),
            link=requested_link(link, latency_s),
            strategies=tuple(strategies),
            transports=tuple(transports),
            scaling=scaling,
            global_batch=global_batch,
            micro_batches=micro_batches,
        )
        return predict(finished_trials([self]), request)

    def figures(self) -> dict[str, go.Figure]:
        """Return the figures of the report as Plotly figures, by their titles.

        The titles of figures of one trial begin with its id.
        """
        return {name: chart.figure() for name, chart in charts(self.comparison).items()}

    def to_html(self, path: StrPath | None = None) -> Path:
        """Write the report, one HTML file, and return its path. Default: RUN_DIR/report.html."""
        out = self.files.report if path is None else Path(path)
        write_text(out, render(self.comparison))
        return out

    def __repr__(self) -> str:
        return f"<paceline.Run {self.path}: {len(self.trials)} trials>"

    def __str__(self) -> str:
        """Return the table, or why there is none."""
        try:
            return comparison_text(self.comparison)
        except NotComparable as error:
            return str(error)

    def _repr_html_(self) -> str:
        """Return the same for Jupyter."""
        try:
            return comparison_html(self.comparison)
        except NotComparable as error:
            return f"<pre>{escape(str(error))}</pre>"


class LineProgress:
    """Write a line to standard error for each stage, and for each trial that has ended."""

    def __init__(self) -> None:
        self._label = ""

    def stage(self, text: str) -> None:
        print(text, file=sys.stderr)

    def planned(
        self, summary: str, trials: Sequence[Trial], expected_s: Mapping[str, float]
    ) -> None:
        del trials, expected_s
        print(summary, file=sys.stderr)

    def data(self, done: int, total: int) -> None:
        """Show nothing: the stage has a line, and data sets are made once."""

    def trial_started(self, trial: Trial, files: TrialFiles, number: int, of: int) -> None:
        del files
        self._label = f"[{number}/{of}] {trial.id}"

    def trial_ended(self, trial: Trial, outcome: Outcome) -> None:
        del trial
        seconds = outcome.ended_unix_s - outcome.launched_unix_s
        print(f"{self._label}  {outcome.status}  {seconds:.1f} s", file=sys.stderr)

    def between_trials(self, run: RunFiles) -> None:
        """Show nothing: a ranking that changes needs a terminal."""


def run(
    spec: SpecSource,
    out: StrPath | None = None,
    *,
    resume: bool = False,
    trust_run: bool = False,
    keep_going: bool | None = None,
    changed_script: bool = False,
    progress: Progress | None = None,
) -> Run:
    """Run every trial of a spec, after the search that [tune] asks for, and return the run.

    spec: as for `Plan`. out: the run directory; default runs/NAME-DATE-TIME. resume: run the failed
    and missing trials of a run; a spec that differs from that of the run only in a higher number of
    `repeats`, or in more `trials` at its end, also runs the further ones. trust_run: resume it even
    if you did not make it here. keep_going: run the other trials after one has failed;
    `failed` of the result lists them. None: go on if there are several configurations.
    changed_script: resume although the script, its imports or the task's file have changed.
    progress: receives stages and trials; None is a `LineProgress`.
    Raises UsageError, EnvironmentLacks or DataError before anything runs; RankFailed or TimedOut
    when a trial fails and the others are not run. Finished trials stay.
    """
    if "://" in str(out):
        raise UsageError(
            f"{out}: expected a folder; `paceline run --out URL` copies a run to HDFS or an object "
            "store at its end"
        )
    if resume and out is not None and not trust_run:
        check_own_run(Path(out), THE_SPEC)
    checked = load_spec(spec)
    run_dir = default_run_dir(checked.experiment.name) if out is None else Path(out)
    shown = LineProgress() if progress is None else progress
    how: dict[str, Any] = {
        "resume": resume, "progress": shown, "keep_going": keep_going,
        "changed_script": changed_script,
    }  # fmt: skip
    if checked.experiment.tune is None:
        search, failed = None, experiment.run(checked, run_dir, **how)
    else:
        search, failed = tune_and_run(checked, run_dir, **how)
    finished = Run(run_dir)
    finished.search, finished.failed = search, failed
    with suppress(NotComparable):  # no trial has finished
        write_json(finished.files.comparison, comparison_document(finished.comparison))
    return finished


def load(run_dir: StrPath, *, baseline: str | None = None) -> Run:
    """Return a run directory.

    baseline: shell pattern of configurations; speedups are over the fastest equivalent one that
    matches. Default: that of the spec, else the sequential baseline.
    Raises DataError if the directory contains no trial, or something that no command may follow,
    such as a pipe.
    """
    odd = odd_content(Path(run_dir), unread=MADE)
    if odd is not None:
        raise DataError(odd)
    return Run(run_dir, baseline)
