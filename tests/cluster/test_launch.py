"""Real launchers with small trainings: started by hand, supervised, killed, refused."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.killed import endless, kill_one, wait_for_step
from tests.functional.cli_runs import FAULTS, within
from tests.support.commands import run_command
from tests.support.environment import AS_ROOT, kept_environment
from tests.support.job_specs import job_words

from paceline.base.host.processes import (
    TOKEN_VARIABLE,
    command_line_of,
    pids_with_token,
    pids_with_variable,
    send,
)
from paceline.base.host.spark import find_java, find_spark
from paceline.collectives.host import wait_until
from paceline.measure.records.layout import RunFiles
from paceline.measure.records.tables import row_dicts
from paceline.runner.launchers.base import launcher_for
from paceline.runner.launchers.diagnosis import diagnose
from paceline.runner.launchers.supervise import WaitLimits, supervise

pytestmark = [pytest.mark.cluster, pytest.mark.filterwarnings("ignore::FutureWarning")]

REPOSITORY = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
MPI_JOB = str(REPOSITORY / "mpi-jobs" / "train.py")
SPARK_JOB = str(REPOSITORY / "spark-jobs" / "train.py")
NOTEBOOK = str(Path(__file__).with_name("programs") / "notebook.py")
MPIRUN = [str(BIN / "mpirun"), "--bind-to", "none", "--host", "localhost:2"]
LIMIT_S = 120.0
BARRIER_LIMIT_S = 60.0  # what the project promises, from the launch
REFUSED_WITHIN_S = 5.0  # what the project promises


@pytest.fixture
def dataset(tiny_dataset: Path) -> Path:
    return tiny_dataset


@pytest.fixture
def environment() -> dict[str, str]:
    """Return the environment of a user's shell, with a token that marks all processes."""
    return {
        **kept_environment(),
        **AS_ROOT,
        "JAVA_HOME": str(find_java().path.parent.parent),
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
        TOKEN_VARIABLE: f"test-{os.getpid()}-{time.monotonic_ns()}",
    }


@pytest.fixture
def run_by_hand(environment: dict[str, str], tmp_path: Path) -> Iterator:
    def run(*argv: object, **changes: str) -> subprocess.CompletedProcess[str]:
        return run_command(argv, LIMIT_S, env={**environment, **changes}, cwd=tmp_path)

    yield run
    token = environment[TOKEN_VARIABLE]
    # The driver ends after the JVM, when its Python has exited.
    wait_until(lambda: not pids_with_token(token), 10)
    left = {pid: command_line_of(pid) for pid in pids_with_token(token)}
    send(left, signal.SIGKILL)
    assert left == {}


def task(launcher: str, dataset: Path, out: Path, **keys: Any) -> list[str]:
    small = {
        "data": dataset, "ranks_per_node": 2, "oversubscribe": True, "global_batch": 8,
        "max_steps": 2, "image_size": 32, "telemetry": {"interval_s": 0.5},
    }  # fmt: skip
    return [*job_words(out.parent, launcher, **{**small, **keys}), "--out", str(out)]


def spark_submit(*words: str) -> list[str]:
    return [str(find_spark().path / "bin" / "spark-submit"), *words]


# functional/test_failing_workers.py starts `local` by hand, test_bundle.py Spark with local[2].
STARTS: dict[str, list[Any]] = {
    "torchrun": [
        BIN / "torchrun",
        "--nproc-per-node",
        "2",
        "-m",
        "paceline.runner.launchers.torchrun",
    ],
    "mpi": [*MPIRUN, "-n", "2", sys.executable, MPI_JOB],
}


@pytest.mark.parametrize("launcher", STARTS)
def test_training_by_hand_leaves_all_records(launcher, dataset, run_by_hand, tmp_path):
    out = tmp_path / "run"
    done = run_by_hand(*STARTS[launcher], *task(launcher, dataset, out))
    assert done.returncode == 0, done.stderr
    check_records(out, launcher)


def check_records(out: Path, launcher: str) -> None:
    [(name, files)] = RunFiles(out).trials()
    assert name.startswith(f"tiny.{launcher}.")
    outcome = json.loads(files.outcome.read_text())
    assert outcome["status"] == "ok"
    assert 0 < outcome["ended_unix_s"] - outcome["launched_unix_s"] < LIMIT_S
    assert [rank for rank, _ in files.ranks()] == [0, 1]
    for _, rank in files.ranks():
        assert json.loads(rank.status.read_text())["state"] == "done"
        assert len(list(row_dicts(rank.steps))) == 2
        environment = json.loads(rank.environment.read_text())
        assert environment["intraop_threads"] == 1
        assert environment["omp_environment"]["OMP_NUM_THREADS"] == "1"
    assert f"--only '*.{launcher}.*.processes.*'" in files.command.read_text()
    [(_, host)] = files.hosts()
    assert list(row_dicts(host.trace))


@pytest.mark.parametrize("transport", ["gloo", "spark-rounds"])
def test_training_in_the_context_of_a_notebook(transport, dataset, run_by_hand, tmp_path):
    out = tmp_path / "run"
    words = task("spark", dataset, out, transport=transport)
    done = run_by_hand(sys.executable, NOTEBOOK, SPARK_JOB, *words)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found.pop("cores") == [found.pop("all_cores")] * 2  # no pinned worker is used again
    assert found == {"codes": [0, 0], "sum": 10, "kept": True}, done.stderr
    assert done.stderr.count("uses the existing SparkContext (local-") == 2
    for _, files in RunFiles(out).trials():
        assert json.loads(files.outcome.read_text())["status"] == "ok"
    assert len(list(RunFiles(out).trials())) == 2


def test_training_on_executors_of_their_own(dataset, run_by_hand, tmp_path):
    """Spark starts two executors, as on a cluster; the tests with labs have a real master."""
    out = tmp_path / "run"
    submit = spark_submit("--master", "local-cluster[2,1,512]", "--driver-memory", "512m")
    conf = ["--conf", "spark.executor.memory=512m", "--conf", "spark.executor.cores=1"]
    conf += ["--conf", f"spark.executor.extraJavaOptions={os.environ['SPARK_SUBMIT_OPTS']}"]
    done = run_by_hand(*submit, *conf, SPARK_JOB, *task("spark", dataset, out))
    assert done.returncode == 0, done.stderr
    check_records(out, "spark")


@pytest.mark.parametrize(
    ("launcher", "rank", "gone_within_s", "keys"),
    [
        ("torchrun", 1, 10, {}),
        ("mpi", 0, 10, {}),
        ("spark", 0, 30, {}),
        ("spark", 1, 30, {"transport": "spark-rounds", "averaging_period_steps": 100_000}),
    ],
    ids=["torchrun", "mpi", "spark", "spark-rounds"],
)
def test_killed_rank_ends_everything_and_is_named(
    launcher, rank, gone_within_s, keys, dataset, tmp_path, token
):
    """Rank 0 serves the store. tests/functional/test_failing_workers.py kills a rank of `local`."""
    trial, files = endless(launcher, dataset, tmp_path / "run", **keys)
    killed = kill_one(trial, files, token, lambda: wait_for_step(files, rank))
    assert killed.took_s < gone_within_s
    outcome = killed.outcome
    assert (outcome.status, outcome.exit_code, outcome.failed_rank) == ("failed", 5, rank)
    assert f"rank {rank} of 2" in outcome.message
    if keys.get("transport") != "spark-rounds":
        assert str(files.rank(rank).log) in outcome.message
    # mpirun's own control port cannot be bound to one interface: open-mpi/ompi#14441
    assert [s for s in killed.listeners if s[0] not in ("prterun", "mpirun")] == []


def test_task_that_stays_away_from_the_others_ends_the_trial(dataset, tmp_path, token, monkeypatch):
    """Spark's own limit is a year."""
    monkeypatch.setenv("PYTHONPATH", str(FAULTS))
    monkeypatch.setenv("ABSENT_RANK", "1")
    trial, files = endless("spark", dataset, tmp_path / "run", rendezvous_s=5.0)
    starter = launcher_for("spark")
    ended = supervise(starter.command(trial, files), files, WaitLimits(trial_s=LIMIT_S))
    assert not ended.timed_out
    assert ended.ended_unix_s - ended.launched_unix_s < BARRIER_LIMIT_S
    assert pids_with_token(token) == set()
    outcome = diagnose(trial, files, ended, starter)
    assert (outcome.status, outcome.exit_code) == ("timed_out", 6), outcome
    assert "rank 0 waited 5 s for ranks [1]" in outcome.message


@pytest.mark.parametrize("launcher", ["mpi", "spark"])
def test_killed_supervisor_leaves_no_process(launcher, dataset, tmp_path, monkeypatch):
    mark = f"{os.getpid()}{time.monotonic_ns()}"
    monkeypatch.setenv("TEST_SUPERVISOR", mark)
    _, files = endless(launcher, dataset, tmp_path / "run")
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "from paceline.runner.job.job import read_trial\n"
        "from paceline.runner.launchers.base import launcher_for\n"
        "from paceline.runner.launchers.supervise import WaitLimits, launched\n"
        "from paceline.measure.records.layout import TrialFiles\n"
        "files = TrialFiles(Path(sys.argv[1]))\n"
        "trial = read_trial(files.trial)\n"
        "command = launcher_for(trial.launcher).command(trial, files)\n"
        "with launched(command, files) as started:\n"
        "    print(started.pid, flush=True)\n"
        "    started.wait(WaitLimits(trial_s=200))\n"
    )
    supervisor = subprocess.Popen(
        [sys.executable, "-c", program, str(files.root)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert supervisor.stdout is not None
        launcher_pid = int(supervisor.stdout.readline())
        pids = {launcher_pid, wait_for_step(files, 0), wait_for_step(files, 1)}
        assert pids < pids_with_variable("TEST_SUPERVISOR", mark)
    finally:
        supervisor.kill()
        supervisor.communicate()
    wait_until(lambda: not pids_with_variable("TEST_SUPERVISOR", mark), 15)
    left = pids_with_variable("TEST_SUPERVISOR", mark)
    assert not left, [command_line_of(pid) for pid in left]


def test_mpi_job_refuses_what_cannot_work(dataset, run_by_hand, tmp_path):
    out = tmp_path / "run"
    job = [sys.executable, MPI_JOB]

    alone = within(
        REFUSED_WITHIN_S, lambda: run_by_hand(*job, *task("mpi", dataset, out), SLURM_NTASKS="2")
    )
    assert alone.returncode == 3
    assert "expected 2 ranks (SLURM_NTASKS), MPI made a world of 1" in alone.stderr

    three = task("mpi", dataset, out, ranks_per_node=3, global_batch=9)
    fewer = run_by_hand(*MPIRUN, "-n", "2", *job, *three)
    assert fewer.returncode == 2
    assert fewer.stderr.count("expected 3 ranks on 1 node(s), the launcher started 2 on 1") == 1

    nowhere = run_by_hand(*MPIRUN, "-n", "2", *job, *task("mpi", tmp_path / "none", out))
    assert nowhere.returncode == 3
    assert "none: expected a directory" in nowhere.stderr

    wrong = run_by_hand(*MPIRUN, "-n", "2", *job, *task("mpi", dataset, out, precision="fp8"))
    assert wrong.returncode == 2
    assert wrong.stderr.count("precision: expected one of") == 1

    assert not list(out.glob("trials/*/result.json"))
    for done in (alone, fewer, nowhere, wrong):
        assert "Traceback" not in done.stderr


def test_bad_data_on_a_rank_ends_the_mpi_job_with_its_code(run_by_hand, tmp_path):
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "_paceline_manifest.json").write_text("{")
    job = [sys.executable, MPI_JOB, *task("mpi", broken, tmp_path / "run")]
    done = run_by_hand(*MPIRUN, "-n", "2", *job)
    assert done.returncode == 4, done.stderr
    assert "of 2 failed: DataError" in done.stderr
    assert "Traceback" not in done.stderr
    [(_, files)] = RunFiles(tmp_path / "run").trials()
    outcome = json.loads(files.outcome.read_text())
    assert (outcome["status"], outcome["exit_code"]) == ("refused", 4)


def test_spark_job_refuses_what_would_hang(dataset, run_by_hand, tmp_path):
    submit = spark_submit("--master", "local[1]", SPARK_JOB)
    done = run_by_hand(*submit, *task("spark", dataset, tmp_path / "run"))
    # spark-submit gives a driver's standard error out on its own standard output
    assert done.returncode == 3, done.stdout
    assert "has 1 slot(s) of 1 cpu(s)" in done.stdout
    assert "Traceback" not in done.stdout
