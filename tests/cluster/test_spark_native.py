"""Rounds of Spark tasks; real Spark."""

from __future__ import annotations

import json
import os
import signal
import threading
import time

import pytest
from tests.functional.cli_runs import SMALL, Cli, trial
from tests.support.environment import is_kept
from tests.support.job_specs import NO_SIDECAR, job_words

from paceline.host.processes import pids_with_token
from paceline.job.job import parse_job
from paceline.launchers import supervise as supervise_module
from paceline.launchers.base import launcher_for
from paceline.launchers.diagnosis import diagnose
from paceline.launchers.supervise import supervise
from paceline.records.tables import row_dicts

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(400),  # the first test carries the run
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

STEPS = 4
PERIOD = 3  # the second round has one step
LIMIT_S = 120.0


@pytest.fixture(scope="module")
def rows(tmp_path_factory, shared_cache):
    """Return the comparison's rows by transport, and the run directory."""
    folder = tmp_path_factory.mktemp("native")
    spec, out = folder / "native.toml", folder / "run"
    spec.write_text(
        SMALL.replace("max_steps = 20", f"max_steps = {STEPS}")
        .replace("image_size = 128", "image_size = 32")
        .replace("interval_s = 0.1", "enabled = false")
        + trial("spark", "spark-rounds", averaging_period_steps=PERIOD)
    )
    kept = {k: v for k, v in os.environ.items() if is_kept(k)}
    cli = Cli(environment={**kept, "PACELINE_CACHE": str(shared_cache)}, cwd=folder)
    done = cli("run", spec, "--out", out)
    assert done.returncode == 0, done.stderr
    found = json.loads(cli.main("compare", out, "--json").stdout)["rows"]
    return {row["transport"]: row for row in found}, out


def lines(run_dir, transport, rank, name):
    (folder,) = run_dir.glob(f"trials/tiny.*.{transport}.*/ranks/{rank}")
    return list(row_dicts(folder / f"{name}.jsonl"))


def test_rounds_train_on_the_same_samples_to_about_the_same_loss(rows):
    by_transport, run_dir = rows
    row, exact = by_transport["spark-rounds"], by_transport["none"]
    assert row["final_loss"] == pytest.approx(exact["final_loss"], rel=0.05)
    sample_logs = [lines(run_dir, "spark-rounds", rank, "sample_log") for rank in (0, 1)]
    for step, alone in enumerate(lines(run_dir, "none", 0, "sample_log")):
        seen = [i for sample_log in sample_logs for i in sample_log[step]["sample_ids"]]
        assert sorted(seen) == sorted(alone["sample_ids"])


def test_rounds_record_what_they_exchange_with_the_step_that_ends_them(rows):
    _, run_dir = rows
    for rank in (0, 1):
        steps = lines(run_dir, "spark-rounds", rank, "steps")
        assert [s["step"] for s in steps] == list(range(STEPS))
        assert [s["comm_s"] > 0 for s in steps] == [False, False, True, True]
        rounds = lines(run_dir, "spark-rounds", rank, "communication")
        assert [r["operation"] for r in rounds] == ["round", "round"]
        for step, operation in zip(steps[2:], rounds, strict=True):
            took_s = operation["ended_unix_s"] - operation["arrived_unix_s"]
            assert took_s == pytest.approx(step["comm_s"])
    assert not list(run_dir.glob("trials/*/claims"))


def endless(dataset, tmp_path):
    """Return a trial that the test ends; its first round has no end."""
    words = job_words(
        tmp_path, "spark", ranks_per_node=2, transport="spark-rounds", oversubscribe=True,
        averaging_period_steps=100_000, data=dataset, global_batch=8, image_size=32,
        max_steps=100_000, epochs=100_000, telemetry=NO_SIDECAR,
    )  # fmt: skip
    job = parse_job("spark", "test", [*words, "--out", str(tmp_path / "run")])
    job.files.root.mkdir(parents=True)
    job.files.trial.write_text(job.trial.model_dump_json())
    return job.trial, job.files


def test_killed_worker_of_a_round_is_named_and_leaves_no_process(
    tmp_path, tiny_dataset, monkeypatch
):
    """tests/cluster/test_launch.py kills a worker of a barrier stage."""
    token = f"test{os.getpid()}rounds"
    monkeypatch.setattr(supervise_module.secrets, "token_hex", lambda _n: token)
    trial, files = endless(tiny_dataset, tmp_path)
    starter = launcher_for("spark")
    seen = {}

    def kill_rank_1() -> None:
        steps, deadline = files.rank(1).steps, time.monotonic() + 90
        while not (steps.exists() and steps.stat().st_size > 0):
            assert time.monotonic() < deadline, files.launcher_log.read_text()
            time.sleep(0.05)
        seen["killed"] = time.monotonic()
        os.kill(json.loads(files.rank(1).status.read_text())["pid"], signal.SIGKILL)

    killer = threading.Thread(target=kill_rank_1)
    ended = supervise(
        starter.command(trial, files), files, limit_s=LIMIT_S, on_started=lambda _: killer.start()
    )
    gone = time.monotonic()
    killer.join()
    assert not ended.timed_out
    assert gone - seen["killed"] < 30
    assert ended.left_behind == ()
    assert pids_with_token(token) == set()
    outcome = diagnose(trial, files, ended, starter)
    assert (outcome.status, outcome.exit_code, outcome.failed_rank) == ("failed", 5, 1)
    assert "rank 1 of 2" in outcome.message
