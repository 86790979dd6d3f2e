"""Commands on finished runs and plans with changed specs, each through the command line."""

import json
import shutil

import pytest
from tests.functional.cli_runs import NO_SIDECAR, small, trial

pytestmark = pytest.mark.functional


def test_run_does_not_differ_from_its_copy(paceline, small_run, tmp_path):
    copy = shutil.copytree(small_run, tmp_path / "copy")
    shown = paceline.main("compare", small_run, copy)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "Machine, packages, git commit and spec are equal." in shown.stdout
    assert "and undecided in 1" in " ".join(shown.stdout.split())
    document = json.loads(paceline.main("compare", small_run, copy, "--json").stdout)
    (row,) = document["rows"]
    assert (document["schema"], document["differences"]) == (2, [])
    assert (row["ratio"]["estimate"], row["is_different"]) == (1.0, False)
    assert row["equivalent"] == [True, True]


def test_manifest_says_what_may_differ_between_runs(small_run):
    manifest = json.loads((small_run / "manifest.json").read_text())
    assert manifest["packages"]["torch"] == manifest["versions"]["torch"]
    assert "cpu_governor" in manifest["host"]
    assert manifest["git"] is None  # the test runs in a folder without a repository


def test_runs_without_a_common_configuration_are_not_comparable(paceline, small_run, tmp_path):
    other = shutil.copytree(small_run, tmp_path / "other")
    for outcome in other.glob("trials/*/outcome.json"):
        outcome.unlink()
    compared = paceline.main("compare", small_run, other)
    assert compared.returncode == 7
    assert "only in the first run: tiny: local" in compared.stdout
    assert paceline.main("compare", small_run, tmp_path).returncode == 4
    assert paceline.main("compare", small_run, other, "--baseline", "x").returncode == 2


def test_plan_shows_the_trials_of_a_changed_spec(paceline):
    options = ["--only", "*.mpi.gloo.*", "--repeats", "2", "--set", "training.max_steps=9"]
    shown = paceline.main("plan", "quickstart", *options, "--json")
    assert shown.returncode == 0, shown.stderr
    trials = json.loads(shown.stdout)["trials"]
    assert sorted(trial["launcher"] for trial in trials) == ["local", "local", "mpi", "mpi"]
    assert {trial["training"]["max_steps"] for trial in trials} == {9}
    refused = paceline.main("plan", "quickstart", "--only", "mpi", "--repeats", "0")
    assert refused.returncode == 2
    assert "1 fault" in refused.stderr
    unmatched = paceline.main("plan", "quickstart", "--only", "mpi", "--repeats", "auto")
    assert unmatched.returncode == 2
    assert unmatched.stderr.count("\n  - tiny.") == 9


def test_run_with_a_batch_for_each_replica_has_a_table_of_weak_scaling(paceline, tmp_path):
    text = small(max_steps=4, warmup_steps=1, image_size=64).replace(*NO_SIDECAR)
    text = text.replace("global_batch = 16", "batch_per_replica = 4")
    spec, out = tmp_path / "weak.toml", tmp_path / "run"
    spec.write_text(text + trial("local", "shared"))
    ran = paceline.main("run", spec, "--out", out)
    assert ran.returncode == 0, ran.stderr
    assert "Weak scaling of tiny, 4 samples for each replica" in ran.stdout
    document = json.loads(paceline.main("compare", out, "--json").stdout)
    assert list(document["workloads"]) == ["tiny-batch4", "tiny-batch8"]
    assert [row["equivalent"] for row in document["rows"]] == [True] * 3
    (found,) = document["weak_scaling"]
    assert [point["replicas"] for point in found["points"]] == [1, 2]
    assert found["points"][1]["efficiency"]["estimate"] > 0
    assert 'id="weak-scaling"' in (out / "report.html").read_text()
    resumed = paceline.main("run", "--resume", out)
    assert (resumed.returncode, "Weak scaling of tiny" in resumed.stdout) == (0, True)
