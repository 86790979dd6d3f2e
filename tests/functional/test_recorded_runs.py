"""Run directories that 0.3.0 wrote: every reading command still reads them, with the same facts.

recorded_runs/0.3.0/README.md says how they were made. `expected.json` beside them has what 0.3.0
showed, without its estimates of speeds: those are of the statistics of the present version. The
reference of `verify` and its rounded twin are one configuration and one repeat ("twice").
"""

from __future__ import annotations

import csv
import html
import json
import math
import shutil
import tomllib
from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from tests.functional.cli_runs import Cli, cli_in

import paceline as api

pytestmark = pytest.mark.functional

RECORDED = Path(__file__).parent / "recorded_runs/0.3.0"
EXPECTED: dict[str, dict[str, Any]] = json.loads((RECORDED / "expected.json").read_text("utf-8"))
KINDS = sorted(EXPECTED)
SCRIPTS = (
    Path(__file__).parents[2] / "examples/scripts/ddp.py",
    RECORDED.parents[1] / "programs/fails.py",
)
ROW_VALUES = ("equivalent", "equivalence_grade", "failed", "repeats", "layout", "main_cost")


@dataclass(frozen=True)
class Recorded:
    """A copy of a recorded run, and the command line beside it."""

    kind: str
    path: Path
    cli: Cli

    @property
    def expected(self) -> dict[str, Any]:
        return EXPECTED[self.kind]

    @cached_property
    def document(self) -> dict[str, Any]:
        return self.json("compare", self.path)

    @property
    def rows(self) -> list[dict[str, Any]]:
        return self.document["rows"]

    def shown(self, *arguments: str | Path) -> str:
        """Return what a reading command prints; its exit code is that of then."""
        ended = self.cli.main(*arguments)
        runs = sum(isinstance(each, Path) for each in arguments)
        what = f"{arguments[0]} two" if runs == 2 else arguments[0]
        assert ended.returncode == self.expected["refused"].get(what, 0), (what, ended.stderr)
        assert "Traceback" not in ended.stderr
        return ended.stdout

    def json(self, *arguments: str | Path) -> dict[str, Any]:
        """Return the document that a command prints; it is empty if the command refuses."""
        text = self.shown(*arguments, "--json")
        return json.loads(text) if text else {}


@pytest.fixture(scope="module", params=KINDS)
def recorded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """Commands may write a report, exports and a lock into the directory, so it is a copy."""
    folder = tmp_path_factory.mktemp(request.param)
    shutil.copytree(RECORDED / request.param, folder / request.param)
    return Recorded(request.param, folder / request.param, cli_in(folder / "cache", folder))


def close(value: object, expected: object) -> bool:
    """Compare two values of a document; sums of another order may differ in the last digits."""
    if isinstance(value, float) and isinstance(expected, float):
        return math.isclose(value, expected, rel_tol=1e-6)
    return value == expected


def summary(row: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a row that `expected.json` has."""
    return {name: row[name] for name in ROW_VALUES} | {"loss": row["final_loss"]}


def test_compare_shows_the_rows_of_then(recorded: Recorded) -> None:
    rows = {row["configuration"]: summary(row) for row in recorded.rows}
    assert rows.keys() == recorded.expected["rows"].keys()
    for name, expected in recorded.expected["rows"].items():
        differing = {key for key in expected if not close(rows[name][key], expected[key])}
        assert not differing, (name, rows[name], expected)


def test_compare_prints_the_verdict_and_a_line_for_each_row(recorded: Recorded) -> None:
    text = recorded.shown("compare", recorded.path)
    words = " ".join(text.split())
    assert recorded.document["verdict"]["sentence"] in words
    for row in recorded.rows:
        speed = row["samples_per_s"]
        shown = row["failed"] if speed is None else rounded(speed["estimate"])
        assert " ".join(shown.split()) in words, row


def rounded(value: float) -> str:
    """Return a number with three digits, or all digits before the point."""
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"


def test_speeds_follow_from_the_recorded_steps(recorded: Recorded) -> None:
    warmup = recorded.expected["warmup_steps"]
    steps = api.load(recorded.path).steps().group_by("configuration", "trial", "step")
    # a step of all ranks ends with the slowest one
    all_ranks = steps.agg(
        pl.col("started_s").min(), pl.col("ended_s").max(), pl.col("samples").sum()
    ).sort("step")
    rates: dict[str, list[float]] = defaultdict(list)
    for (configuration, _), each in all_ranks.group_by("configuration", "trial"):
        began_s = each["ended_s"][warmup - 1] if warmup else each["started_s"][0]
        samples = each["samples"][warmup:].sum()
        rates[str(configuration)].append(samples / (each["ended_s"][-1] - began_s))
    finished = [row for row in recorded.rows if not row["failed"]]
    assert finished
    for row in finished:
        found = sorted(rates[row["configuration"]])
        shown = sorted(each["samples_per_s"] for each in row["repeat_speeds"])
        if row["configuration"] != recorded.expected.get("twice"):
            assert shown == pytest.approx(found, rel=1e-4)
        speed = row["samples_per_s"]
        if speed["low"]:  # of one repeat they are not known
            assert speed["low"] <= speed["estimate"] <= speed["high"]
        assert shown[0] * (1 - 1e-4) <= speed["estimate"] <= shown[-1] * (1 + 1e-4)


def test_run_does_not_differ_from_itself(recorded: Recorded) -> None:
    text = recorded.shown("compare", recorded.path, recorded.path)
    assert "Machine, packages, git commit and spec are equal." in text
    document = recorded.json("compare", recorded.path, recorded.path)
    finished = {row["configuration"] for row in recorded.rows if not row["failed"]}
    assert {row["configuration"] for row in document["rows"]} == finished
    assert document["differences"] == []
    for row in document["rows"]:
        assert row["ratio"]["estimate"] == pytest.approx(1)
        assert not row["is_different"]


def test_report_has_the_verdict_the_rows_and_the_failures(recorded: Recorded) -> None:
    recorded.shown("report", recorded.path)
    page = html.unescape((recorded.path / "report.html").read_text("utf-8"))
    assert page.rstrip().endswith("</html>")
    assert recorded.document["verdict"]["sentence"].split(". ")[0] in page
    for row in recorded.rows:
        assert row["configuration"] in page
        if row["failed"]:
            assert row["failed"] in page


def test_profile_counts_the_operations(recorded: Recorded) -> None:
    trials = recorded.json("profile", recorded.path)["trials"]
    counted = {trial["trial"]: [operations_of(rank) for rank in trial["ranks"]] for trial in trials}
    assert counted == recorded.expected["operations"]


def operations_of(rank: dict[str, Any]) -> dict[str, int]:
    """Return how many operations of each kind a rank did in its measured steps."""
    counts: Counter[str] = Counter()
    for each in rank["bins"]:
        counts[each["operation"]] += each["count"]
    return dict(counts)


def test_parts_of_an_explanation_add_up(recorded: Recorded) -> None:
    explanations = recorded.json("explain", recorded.path).get("explanations", [])
    pairs = [[each["faster"], each["slower"]] for each in explanations]
    assert sorted(map(sorted, pairs)) == sorted(map(sorted, recorded.expected["explained"]))
    for each in explanations:
        assert each["difference_s"]["mean"] == pytest.approx(each["slower_s"] - each["faster_s"])
        parts = sum(part["difference_s"]["mean"] for part in each["parts"])
        assert parts == pytest.approx(each["difference_s"]["mean"], rel=1e-3)
    for pair in pairs[:1]:
        text = recorded.shown("explain", recorded.path, "--pair", *pair)
        strategies = {
            row["local_strategy"] for row in recorded.rows if row["configuration"] in pair
        }
        assert {name for name in strategies if name in text} == strategies


def test_predictions_are_those_of_then(recorded: Recorded) -> None:
    document = recorded.json("predict", recorded.path)
    predicted = {
        f"{each['setup']} {each['transport']} {each['nodes']}": each["step_s"]
        for each in document.get("predictions", [])
    }
    assert sorted(predicted) == recorded.expected["predicted"]
    for step_s in predicted.values():
        assert 0 < step_s["low"] <= step_s["estimate"] <= step_s["high"]
    refused = {each["setup"] for each in document.get("refusals", [])}
    assert sorted(refused) == recorded.expected["not_predicted"]


def test_exported_tables_have_the_rows_and_steps(recorded: Recorded) -> None:
    for kind in ("csv", "parquet"):
        recorded.shown("export", recorded.path, "--to", kind)
    folder = recorded.path / "export"
    with (folder / "csv/rows.csv").open(encoding="utf-8") as file:
        written = list(csv.DictReader(file))
    assert [each["configuration"] for each in written] == [
        row["configuration"] for row in recorded.rows
    ]
    for row, each in zip(recorded.rows, written, strict=True):
        if row["samples_per_s"] is not None:
            assert float(each["samples_per_s.estimate"]) == row["samples_per_s"]["estimate"]
    steps = pl.read_parquet(folder / "parquet/steps.parquet")
    assert steps.equals(api.load(recorded.path).steps())
    assert dict(steps.group_by("trial").len().iter_rows()) == recorded.expected["steps"]
    tables = {file.stem: pl.read_parquet(file).height for file in folder.glob("parquet/*")}
    assert tables == recorded.expected["tables"]


def test_exported_traces_have_every_trial(recorded: Recorded) -> None:
    recorded.shown("export", recorded.path, "--to", "openmetrics")
    recorded.shown("export", recorded.path, "--to", "perfetto")
    metrics = (recorded.path / "export/openmetrics/run.om").read_text("utf-8")
    assert metrics.endswith("# EOF\n")
    assert len({line.split("{")[0] for line in metrics.splitlines()}) == recorded.expected["series"]
    for trial, steps in recorded.expected["steps"].items():
        trace = json.loads((recorded.path / f"export/perfetto/{trial}.json").read_text("utf-8"))
        names = Counter(each["name"] for each in trace["traceEvents"] if each["ph"] == "X")
        assert sum(names.values()) >= steps, trial


def test_watch_says_how_many_trials_are_done(recorded: Recorded) -> None:
    assert recorded.expected["watched"] in recorded.shown("watch", recorded.path, "--once")


def test_python_reads_the_same_as_the_command_line(recorded: Recorded) -> None:
    run = api.load(recorded.path)
    assert run.rows() == recorded.rows
    assert run.verdict.sentence == recorded.document["verdict"]["sentence"]
    assert run.to_polars()["configuration"].to_list() == [
        row["configuration"] for row in recorded.rows
    ]
    assert run.trace().height == recorded.expected["tables"].get("host_trace", 0)


def test_spec_of_the_run_still_plans_the_same_trials(recorded: Recorded) -> None:
    manifest = json.loads((recorded.path / "manifest.json").read_text("utf-8"))
    if not recorded.expected["plans"]:
        pytest.skip("the run has no spec")
    for script in SCRIPTS:
        shutil.copy(script, recorded.cli.cwd)
    spec = recorded.cli.cwd / "again.toml"
    spec.write_text(manifest["spec_toml"], "utf-8")
    assert tomllib.loads(manifest["spec_toml"])["name"] == manifest["name"]
    planned = recorded.json("plan", spec)["trials"]
    assert {trial["id"] for trial in planned} == set(manifest["trials"])


@pytest.mark.usefixtures("tiny_dataset")
@pytest.mark.parametrize("kind", ["tiny", "resumed"])
def test_finished_run_resumes_to_nothing(paceline: Cli, tmp_path: Path, kind: str) -> None:
    run = shutil.copytree(RECORDED / kind, tmp_path / kind)
    before = {path: path.stat().st_mtime_ns for path in run.glob("trials/*/outcome.json")}
    ended = paceline.main("run", "--resume", run, "--trust-run")
    assert ended.returncode == 0, ended.stderr
    assert {path: path.stat().st_mtime_ns for path in run.glob("trials/*/outcome.json")} == before
    assert "speedup" in ended.stdout
