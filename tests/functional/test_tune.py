"""Searches from spec to tuned spec, and a run that begins with one."""

from __future__ import annotations

import json
import shutil
import tomllib

import pytest
from tests.functional.cli_runs import cli_in
from tests.support.documentation import ROOT
from tests.support.outputs import WRITES, compare_outputs, without_places
from tests.support.specs import spec_text

pytestmark = [pytest.mark.functional, pytest.mark.timeout(400)]

PAGE = ROOT / "docs/how-to/tune.md"
STEPS, REPEATS, SIZE = (20, 4, 64) if WRITES else (3, 1, 32)


def search_text(*trials, tune):
    """Return the spec of a search; tune: further keys of [tune]."""
    tables = (
        f"[training]; global_batch = 16; image_size = {SIZE}; [telemetry]; enabled = false; "
        "[limits]; trial_s = 120; rendezvous_s = 60; collective_s = 60; "
        f"[tune]; steps = {STEPS}; warmup_steps = 1; repeats = {REPEATS}; {tune}"
    )
    workload = 'name = "tiny"; samples = 48'
    return spec_text(*trials, workload=workload, tables=tables, name="search", seed=3, repeats=1)


SPEC = search_text(
    'launcher = "mpi"; local_strategy = "best"',
    tune='strategies = ["intraop", "processes"]; oversubscribe = true',
)
SENDS = 'local_strategy = "processes"; ranks_per_node = 2; oversubscribe = true'
COMM = search_text(
    f'launcher = "mpi"; transport = "mpi"; {SENDS}',
    f'launcher = "local"; {SENDS}',
    tune="buckets_mb = [0.05]; buckets_in_flight = []; bucket_waits_ms = [1]; algorithms = []; "
    "mpi_parameters = []",
)


def tuned(folder, cache, forks, what, text):
    """Return the command line of a search, its spec, its directory and what it has said."""
    spec = folder / "search.toml"
    spec.write_text(text)
    cli = cli_in(cache, folder, forks)
    result = cli.main("tune", what, spec, "--out", folder / "found")
    assert result.returncode == 0, result.stderr
    return cli, spec, folder / "found", result


@pytest.fixture(scope="module")
def searched(tmp_path_factory, cache, forks):
    return tuned(tmp_path_factory.mktemp("search"), cache, forks, "local", SPEC)


@pytest.mark.parametrize(("search", "what"), [("searched", "local"), ("communicated", "comm")])
def test_the_page_shows_what_a_search_prints(request, search, what):
    cli, _, _, result = request.getfixturevalue(search)
    output = without_places(result.stdout, cli.cwd)
    compare_outputs(PAGE, {f"paceline tune {what} search.toml --out found": output})


def outcomes(run_dir):
    return {p: p.stat().st_mtime_ns for p in run_dir.glob("trials/*/outcome.json")}


def test_every_strategy_is_in_the_table_within_80_columns(searched):
    _, _, found, result = searched
    table = result.stdout.partition("next:")[0]
    assert max(map(len, table.splitlines())) <= 80
    for strategy in ("sequential", "intraop", "processes"):
        assert strategy in table
    assert (found / "tuned.toml").exists()
    assert result.stdout.splitlines()[-1] == f"next: paceline run {found / 'tuned.toml'}"


def test_trials_of_the_search_are_recorded_and_compared(searched):
    cli, _, found, _ = searched
    rows = json.loads(cli.main("compare", found, "--json").stdout)["rows"]
    strategies = {row["local_strategy"] for row in rows}
    assert strategies == {"sequential", "intraop", "processes"}
    assert all(row["equivalent"] for row in rows)
    told = json.loads((found / "tuning.json").read_text())
    assert told["best"]["tiny"] in {row["configuration"] for row in rows}


def test_tuned_spec_says_the_best_strategy_and_can_be_planned(searched):
    cli, _, found, _ = searched
    tuned = tomllib.loads((found / "tuned.toml").read_text())
    (mpi,) = [t for t in tuned["trials"] if t["launcher"] == "mpi"]
    best = json.loads((found / "tuning.json").read_text())["best"]["tiny"]
    assert mpi["local_strategy"] in best
    planned = json.loads(cli.main("plan", found / "tuned.toml", "--json").stdout)
    assert {t["launcher"] for t in planned["trials"]} == {"local", "mpi"}


@pytest.mark.parametrize(("search", "what"), [("searched", "local"), ("communicated", "comm")])
def test_finished_search_resumes_to_nothing_and_says_the_same(request, search, what):
    cli, _, found, result = request.getfixturevalue(search)
    before = outcomes(found)
    again = cli.main("tune", what, "--resume", found)
    assert again.returncode == 0, again.stderr
    assert outcomes(found) == before
    assert again.stdout == result.stdout


def test_unfinished_trial_alone_is_measured_again(searched):
    cli, _, found, _ = searched
    victim = next((found / "trials").glob("*intraop*"))
    (victim / "outcome.json").unlink()
    before = outcomes(found)
    assert cli.main("tune", "local", "--resume", found).returncode == 0
    assert outcomes(found).items() - before.items() == {
        (victim / "outcome.json", (victim / "outcome.json").stat().st_mtime_ns)
    }


def test_plan_shows_what_would_be_searched_and_runs_nothing(searched, tmp_path):
    cli, spec, _, _ = searched
    shown = cli.main("plan", spec)
    assert shown.returncode == 0, shown.stderr
    assert "tiny processes:" in shown.stdout
    assert "winners that are not known yet" in shown.stdout
    told = json.loads(cli.main("plan", spec, "--json").stdout)
    assert [s["local_strategy"] for s in told["search"]] == ["sequential", "intraop", "processes"]
    assert told["trials"] is None


def test_run_goes_on_from_a_search_with_the_best_strategy(searched, tmp_path):
    """The search of this very spec is there already, as after an interruption."""
    cli, _, found, _ = searched
    run_dir = tmp_path / "run"
    shutil.copytree(found, run_dir / "tune")
    result = cli.main("run", "--resume", run_dir, "--trust-run")  # it was moved
    assert result.returncode == 0, result.stderr
    rows = json.loads((run_dir / "comparison.json").read_text())["rows"]
    assert {row["launcher"] for row in rows} == {"local", "mpi"}
    assert (run_dir / "report.html").exists()
    again = cli.main("run", "--resume", run_dir)
    assert again.returncode == 0, again.stderr


def test_search_without_time_says_how_to_go_on(paceline, tmp_path):
    spec = tmp_path / "search.toml"
    spec.write_text(SPEC)
    out = tmp_path / "found"
    result = paceline.main("tune", "local", spec, "--out", out, "--limit", "1e-6")
    assert result.returncode == 7
    assert "--resume" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.fixture(scope="module")
def communicated(tmp_path_factory, cache, forks):
    return tuned(tmp_path_factory.mktemp("comm"), cache, forks, "comm", COMM)


def test_communication_is_searched_for_trials_that_send_within_80_columns(communicated):
    _, _, found, result = communicated
    table = result.stdout.partition("next:")[0]
    assert max(map(len, table.splitlines())) <= 80
    assert "\ntrials[2]: mpi, mpi, processes, 1 x 2 ranks\n" in table
    assert "\ntrials[3]: left out: all: ranks of one node share its memory" in table
    searched, alone = json.loads((found / "tuning.json").read_text())["targets"]
    assert (searched["target"], searched["candidates"]) == ("trials[2]", 3)
    points = {point["configuration"]: point for point in searched["points"]}
    assert len(points) == 3
    assert [p["options"].get("bucket_wait_ms") for p in points.values()] == [None, None, 1]
    assert all(point["samples_per_s"] for point in points.values())
    assert searched["failures"] == {}
    assert alone["candidates"] == 0


def test_spec_with_the_best_communication_can_be_planned(communicated):
    cli, _, found, _ = communicated
    searched, _ = json.loads((found / "tuning.json").read_text())["targets"]
    planned = json.loads(cli.main("plan", found / "tuned.toml", "--json").stdout)["trials"]
    (mpi,) = {t["id"].rpartition(".r")[0] for t in planned if t["launcher"] == "mpi"}
    assert mpi == searched["chosen"]
