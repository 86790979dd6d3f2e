"""Paceline from Python: results of a run directory in every form, plans, and what is refused."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from html import unescape

import plotly.graph_objects as go
import pytest
from tests.support.rows import ENDED_WELL
from tests.unit.analysis import fabricate

import paceline
from paceline.analysis.compare.run import compare_run
from paceline.api import LineProgress
from paceline.base.errors import DataError, NotComparable, UsageError
from paceline.plan.spec.loading import load_spec
from paceline.plan.trials.trial import Trial
from paceline.show.report.document import render

HEAVY = ("torch", "pyspark", "polars", "pandas", "plotly", "pydantic", "numpy")
DESCRIPTORS = "from paceline.plan.spec.extensions import GROUPS as g; [e.all() for e in g.values()]"
HELP = "from paceline.cli import main; main(['--help'])"
SPEC = {
    "schema": 2,
    "name": "mine",
    "repeats": 2,
    "workloads": [{"name": "tiny", "samples": 48}],
    "trials": [
        {"launcher": "local", "local_strategy": "sequential"},
        {
            "launcher": "mpi",
            "local_strategy": "processes",
            "ranks_per_node": 2,
            "oversubscribe": True,
        },
    ],
}


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    ways = [fabricate.SEQUENTIAL, fabricate.MPI]
    return fabricate.make_run(tmp_path_factory.mktemp("api") / "run", ways, repeats=2).root


@pytest.fixture(scope="module")
def run(run_dir):
    return paceline.load(run_dir)


@pytest.mark.parametrize(
    ("statement", "heavy"),
    [
        ("import paceline", HEAVY),
        ("import paceline.analysis.compare.run", ("torch", "plotly", "pyspark", "mpi4py")),
        ("import paceline.cli.doctor", ("torch", "pyarrow", "plotly")),
        ("import paceline.runner.preflight.probe", ("torch",)),
        (
            "import paceline.measure.telemetry",
            ("psutil", "prometheus_client", "ssl", "torch", "numpy"),
        ),
        ("import paceline.measure.telemetry.sidecar", ("torch", "pyarrow", "numpy")),
        # pyarrow starts threads, beside which the tests' ranks cannot be forked
        ("import paceline.train.workloads.build", ("pyarrow", "cv2", "plotly", "mpi4py")),
        ("import paceline.runner.trials.run_trial", ("torch", "scipy", "pyarrow")),
        ("import paceline.runner.launchers.spark.stage", ("torch", "pyarrow")),
        ("import paceline.runner.job.rank", ("torch", "pyarrow", "polars")),
        ("import paceline.show.report.table", ("torch", "plotly")),
        ("import paceline.train.transports.descriptors", ("torch", "numpy")),
        (DESCRIPTORS, ("torch", "pyspark", "mpi4py", "numpy", "polars")),
        (HELP, ("torch", "polars", "rich", "pydantic", "numpy", "tomllib")),
    ],
)
def test_large_libraries_are_loaded_only_where_they_are_needed(statement, heavy):
    program = f"{statement}\nimport sys; print(*(n for n in {heavy} if n in sys.modules))"
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert ended.stdout.splitlines()[-1] == ""


def test_every_public_name_exists():
    assert [name for name in paceline.__all__ if not hasattr(paceline, name)] == []
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = paceline.nothing


def test_rows_are_those_of_compare(run, run_dir):
    assert run.rows() == compare_run(fabricate.RunFiles(run_dir)).to_json()["rows"]
    frame = run.to_polars()
    assert frame["launcher"].to_list() == ["mpi", "local"]
    expected = fabricate.SEQUENTIAL.step_s / fabricate.MPI.step_s
    assert frame["speedup.estimate"].to_list() == pytest.approx([expected, 1.0])
    assert frame["phases_s.forward"].to_list() == [r["phases_s"]["forward"] for r in run.rows()]
    assert not {"speedup", "phases_s"} & set(frame.columns)


def test_pandas_has_the_same_rows(run):
    frame, expected = run.to_pandas(), run.to_polars()
    assert list(frame.columns) == expected.columns
    assert frame["speedup.estimate"].tolist() == expected["speedup.estimate"].to_list()


def test_frames_have_the_rows_of_all_trials(run):
    # two repeats of one rank and of two ranks, 12 steps each
    assert len(run.steps()) == 2 * (1 + 2) * fabricate.Case().steps
    trial = run.trials[0].trial
    of_one = run.steps(trial.id)
    assert set(of_one["trial"]) == {trial.id}
    assert len(of_one) == trial.placement.ranks * fabricate.Case().steps
    trace = run.trace()
    assert set(trace["trial"]) == {record.trial.id for record in run.trials}
    assert {"host", "cpu_busy_percent", "cpu_seconds.user", "disks.sda.read_bytes"} <= set(
        trace.columns
    )
    assert run.communication().is_empty()
    assert run.rank_trace().is_empty()


def test_unknown_trial_is_refused(run):
    with pytest.raises(UsageError, match=r"no trial 'x'; there are tiny\.local"):
        run.steps("x")


def test_verdict_of_one_and_of_several_workloads(run, tmp_path):
    assert run.verdict.best == run.rows()[0]["configuration"]
    assert "The fastest is " in run.verdict.sentence
    other = fabricate.Case(workload="simple-big", model="alexnet")
    two = fabricate.make_run(
        tmp_path / "two", [fabricate.SEQUENTIAL], cases=[fabricate.Case(), other]
    )
    several = paceline.load(two.root)
    assert set(several.verdicts) == {"tiny", "simple-big"}
    with pytest.raises(UsageError, match="expected one workload, the run has tiny, simple-big"):
        _ = several.verdict


def test_predictions_are_those_of_the_request(run):
    found = run.predict([4, 1], link="10gbit", scaling="weak", transports=["gloo"])
    places = {(p.nodes, p.transport) for p in found.predictions}
    assert places == {(1, None), (1, "mpi"), (4, "gloo")}
    for wrong in ({"link": "fast"}, {"latency_s": 1e-4}, {"nodes": [0]}, {"transports": ["pony"]}):
        with pytest.raises(UsageError, match=r"expected|unknown"):
            run.predict(**wrong)


def test_figures_are_those_of_the_report(run):
    figures = run.figures()
    in_page = len(re.findall(r'<script type="application/json"', render(run.comparison)))
    assert len(figures) == in_page
    assert all(isinstance(figure, go.Figure) for figure in figures.values())
    speedup = figures["Speedup, tiny"]
    assert speedup.layout.title.text == "Speedup, tiny"
    assert speedup.data[0].x[-1] == pytest.approx(run.to_polars()["speedup.estimate"].max())
    trial = run.trials[0].trial.id
    assert f"{trial}: CPU, RAM, threads on node0" in figures


def test_report_is_written_where_it_is_asked_for(run, tmp_path):
    path = run.to_html(tmp_path / "page.html")
    assert path == tmp_path / "page.html"
    assert '<h2 id="speed">' in path.read_text("utf-8")


def test_table_in_a_notebook_and_as_text(run, tmp_path):
    html = run._repr_html_()
    text = unescape(re.sub("<[^>]+>", "", html))
    assert run.verdict.sentence.split(".")[0] in " ".join(text.split())
    assert "processes" in text
    assert "processes" in str(run)
    assert repr(run) == f"<paceline.Run {run.path}: 4 trials>"


def test_texts_of_a_run_cannot_add_html(tmp_path):
    made = fabricate.make_run(tmp_path / "run", [fabricate.SEQUENTIAL, fabricate.MPI])
    files = next(files for name, files in made.trials() if ".mpi." in name)
    evil = "<script>alert(1)</script>"
    fabricate.edit_json(files.outcome, status="failed", exit_code=5, message=evil)
    html = paceline.load(made.root)._repr_html_()
    assert "&lt;script&gt;alert(1)" in html
    assert "<script" not in html


def test_a_run_without_a_finished_trial_shows_the_reasons(tmp_path):
    made = fabricate.make_run(tmp_path / "run", [fabricate.SEQUENTIAL])
    (files,) = (files for _, files in made.trials())
    fabricate.edit_json(files.outcome, status="failed", exit_code=5, message="rank 0 <died>")
    run = paceline.load(made.root)
    with pytest.raises(NotComparable):
        run.rows()
    assert "failed: rank 0 <died>" in str(run)
    assert "rank 0 &lt;died&gt;" in run._repr_html_()
    assert len(run.steps()) == fabricate.Case().steps


def test_a_folder_without_trials_is_refused(tmp_path):
    with pytest.raises(DataError, match="expected a run directory"):
        paceline.load(tmp_path)


@pytest.mark.parametrize("form", ["mapping", "experiment", "path", "text"])
def test_plan_accepts_every_form_of_a_spec(form, tmp_path):
    experiment, text = load_spec(SPEC)
    path = tmp_path / "mine.toml"
    path.write_text(text, "utf-8")
    forms = {"mapping": SPEC, "experiment": experiment, "path": path, "text": str(path)}
    plan = paceline.Plan(forms[form])
    assert plan.experiment == experiment
    assert len(plan.trials) == 4
    assert list(plan.commands) == [trial.id for trial in plan.trials]
    mpi = next(trial.id for trial in plan.trials if trial.launcher == "mpi")
    assert "mpirun" in plan.commands[mpi]
    assert repr(plan) == "<paceline.Plan of mine: 4 trials>"


def test_plan_of_a_shipped_experiment():
    assert len(paceline.Plan("quickstart").trials) == 9 * 5


def test_lines_of_progress(make_trial, capsys):
    progress = LineProgress()
    progress.stage("data set for tiny")
    progress.data(1, 2)
    trial: Trial = make_trial()
    progress.trial_started(trial, None, 2, 9)
    progress.trial_ended(trial, replace(ENDED_WELL, ended_unix_s=2.25))
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.splitlines() == ["data set for tiny", "[2/9] t  ok  2.2 s"]


def test_run_at_a_url_is_refused():
    with pytest.raises(UsageError, match="hdfs://host/run: expected a folder"):
        paceline.run("quickstart", out="hdfs://host/run")
