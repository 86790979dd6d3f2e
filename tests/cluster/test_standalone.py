"""A Spark standalone master with two workers, on loopback: the job by hand, as on a cluster."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from paceline.data.catalogue import ensure_dataset
from paceline.launch.tools import find_java, find_spark

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
READY_S = 60.0
OPTIONS = (
    "--ranks 2 --workload tiny --max-steps 6 --epochs 4 --warmup-steps 1 --global-batch 16 "
    "--oversubscribe"
)


@contextmanager
def daemon(command: list[str], environment: dict[str, str], log: Path):
    """A process of Spark's that is ended, whatever happens."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=environment, stdout=output, stderr=subprocess.STDOUT, cwd=log.parent
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(timeout=20)


def wait_for(log: Path, pattern: str) -> re.Match[str]:
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        found = re.search(pattern, log.read_text(errors="replace"))
        if found:
            return found
        time.sleep(0.2)
    raise AssertionError(f"{pattern!r} not within {READY_S:.0f} s in:\n{log.read_text()}")


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    return {
        **os.environ,
        "JAVA_HOME": str(find_java().path.resolve().parent.parent),
        "SPARK_HOME": str(find_spark().path),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_LOCAL_DIRS": str(tmp_path_factory.mktemp("spark")),
        "PYSPARK_PYTHON": sys.executable,
    }


@pytest.fixture(scope="module")
def master(environment, tmp_path_factory):
    folder = tmp_path_factory.mktemp("standalone")
    spark_class = str(find_spark().path / "bin" / "spark-class")
    package = "org.apache.spark.deploy"
    with ExitStack() as stack:
        log = folder / "master.log"
        command = [spark_class, f"{package}.master.Master", "--host", "127.0.0.1"]
        command += ["--port", "0", "--webui-port", "0"]
        stack.enter_context(daemon(command, environment, log))
        url = wait_for(log, r"Starting Spark master at (spark://127\.0\.0\.1:\d+)").group(1)
        for number in (1, 2):
            worker_log = folder / f"worker{number}.log"
            command = [spark_class, f"{package}.worker.Worker", "--host", "127.0.0.1"]
            command += ["--cores", "1", "--memory", "1g", "--webui-port", "0"]
            command += ["-d", str(folder / f"worker{number}"), url]
            stack.enter_context(daemon(command, environment, worker_log))
            wait_for(worker_log, "Successfully registered with master")
        yield url


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return ensure_dataset("tiny", images=32, seed=3, cache_dir=tmp_path_factory.mktemp("cache"))


def submit(master: str, environment: dict[str, str], *arguments: str):
    spark_submit = find_spark().path / "bin" / "spark-submit"
    return subprocess.run(
        [str(spark_submit), "--master", master, "--executor-memory", "512m", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )


def test_ranks_land_on_both_workers_and_train(master, environment, dataset, tmp_path):
    out = tmp_path / "run"
    script = str(ROOT / "spark-jobs" / "train.py")
    result = submit(
        master, environment, script, *OPTIONS.split(), "--data", str(dataset), "--out", str(out)
    )
    assert result.returncode == 0, result.stderr[-3000:]
    (trial,) = (out / "trials").iterdir()
    assert json.loads((trial / "outcome.json").read_text())["status"] == "ok"
    statuses = [json.loads(p.read_text()) for p in sorted(trial.glob("ranks/*/status.json"))]
    assert [s["state"] for s in statuses] == ["done", "done"]
    assert statuses[0]["pid"] != statuses[1]["pid"]


def test_more_ranks_than_slots_are_refused_with_both_numbers(
    master, environment, dataset, tmp_path
):
    script = str(ROOT / "spark-jobs" / "train.py")
    options = OPTIONS.replace("--ranks 2", "--ranks 4").split()
    result = submit(
        master, environment, script, *options, "--data", str(dataset), "--out", str(tmp_path / "r")
    )
    said = result.stdout + result.stderr
    assert result.returncode == 3, said[-3000:]
    assert re.search(r"4\b.*\b2 slot|2 slot.*\b4\b", said), said[-3000:]
