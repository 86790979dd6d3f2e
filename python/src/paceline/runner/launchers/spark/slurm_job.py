"""One trial under Spark in the allocation of a Slurm job; `paceline render slurm` writes the call.

    python -m paceline.runner.launchers.spark.slurm_job --trial TRIAL_JSON --out RUN_DIR --repeat N

On several nodes this process starts a standalone master beside itself and, by srun, a worker on
each node. All of it ends with this process. On one node Spark needs no cluster.
"""

from __future__ import annotations

import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from paceline.base.errors import EnvironmentLacks, ExitCode, UsageError
from paceline.base.host.processes import end_processes, guarded
from paceline.base.host.programs import job_script
from paceline.base.host.spark import find_spark
from paceline.collectives.host import interface_address, wait_until
from paceline.plan.trials.trial import Trial
from paceline.runner.job import run_guarded
from paceline.runner.job.job import check_reachable, parse_arguments, read_trial
from paceline.runner.launchers.descriptors import SparkOptions
from paceline.runner.launchers.schedulers.files import limit_s
from paceline.runner.launchers.spark.configuration import slots_per_node
from paceline.runner.launchers.spark.launcher import SparkLauncher, submission
from paceline.runner.launchers.spark.standalone import (
    Daemon,
    daemon_command,
    daemon_environment,
    start_daemon,
    wait_for,
)

_MASTER = re.compile(r"Starting Spark master at (spark://\S+)")
_MASTER_S = 60.0
_END_S = 15.0
_POLL_S = 0.2
_AUTHENTICATE = "-Dspark.authenticate=true"
# Spark reads the secret of its daemons and executors from here (SecurityManager.scala).
_SECRET_VARIABLE = "_SPARK_AUTH_SECRET"  # noqa: S105  (a name, not a secret)


def main() -> int:
    arguments = parse_arguments("python -m paceline.runner.launchers.spark.slurm_job")
    if arguments.trial is None:
        raise UsageError("expected --trial TRIAL_JSON, as `paceline render slurm` writes it")
    trial = read_trial(arguments.trial)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(ExitCode.TERMINATED))
    with tempfile.TemporaryDirectory(prefix="paceline-spark-") as made:
        folder = Path(made)
        java = f"{os.environ.get('SPARK_SUBMIT_OPTS', '')} -Djava.io.tmpdir={folder}".lstrip()
        driver = {**os.environ, "SPARK_SUBMIT_OPTS": java, "SPARK_LOCAL_DIRS": made}
        if trial.placement.nodes == 1:
            return _submit(_with_master(trial, None), driver, [])
        with _cluster(trial, folder) as cluster:
            return _submit(
                _with_master(trial, cluster.master), {**driver, **cluster.driver}, cluster.daemons
            )


def _with_master(trial: Trial, master: str | None) -> Trial:
    options = trial.options_as(SparkOptions).model_copy(update={"master": master})
    return trial.model_copy(update={"launcher_options": options})


def _submit(
    trial: Trial, environment: Mapping[str, str], daemons: list[subprocess.Popen[bytes]]
) -> int:
    """Run spark-submit with the options of this process; return its exit code.

    Raises EnvironmentLacks if a daemon ends before.
    """
    SparkLauncher().preflight(trial)
    command = submission(trial)
    argv = [*command.argv, str(job_script("spark-jobs", "train.py")), *sys.argv[1:]]
    job = subprocess.Popen(
        guarded(argv), env={**environment, **command.environment}, stdin=subprocess.DEVNULL
    )
    try:

        def over() -> bool:
            return job.poll() is not None or any(d.poll() is not None for d in daemons)

        # The job ends by its own limit, which began later; this one is Slurm's.
        wait_until(over, limit_s(trial), poll_s=_POLL_S)
        if job.poll() is None and any(daemon.poll() is not None for daemon in daemons):
            raise EnvironmentLacks(
                "Spark's master or a worker ended before the trial; its last lines are above, and "
                "a worker's are in the log of the Slurm job"
            )
    finally:
        [exit_status] = end_processes([job], _END_S)
    return exit_status


@dataclass(frozen=True, slots=True)
class _Cluster:
    """A master, the variables with which a driver may use it, and all daemons."""

    master: str
    driver: Mapping[str, str]
    daemons: list[subprocess.Popen[bytes]]


@contextmanager
def _cluster(trial: Trial, folder: Path) -> Iterator[_Cluster]:
    """Start a master and the workers; end them at the end.

    A new secret lets only this job's processes use the cluster. It reaches them through variables
    and a file that only this user can read.
    """
    nodes = os.environ.get("SLURM_JOB_NODELIST")
    if nodes is None:
        raise EnvironmentLacks(
            "expected a Slurm job of several nodes (SLURM_JOB_NODELIST); submit the rendered file "
            "with sbatch"
        )
    check_reachable(trial.interface, [nodes, "its other nodes"])
    secret, address = secrets.token_hex(32), interface_address(trial.interface)
    environment = {**daemon_environment(address), _SECRET_VARIABLE: secret}
    options = environment.get("SPARK_DAEMON_JAVA_OPTS", "")
    environment["SPARK_DAEMON_JAVA_OPTS"] = f"{options} {_AUTHENTICATE}".lstrip()
    begun: list[subprocess.Popen[bytes]] = []
    try:
        master = _master(address, environment, folder)
        begun.append(master.process)
        wait_for([master], _MASTER_S)
        found = _MASTER.search(master.text())
        assert found is not None, "a master that is ready has written its address"
        begun.append(_workers(trial, found[1], environment))
        driver = {
            "SPARK_LOCAL_HOSTNAME": address,
            "SPARK_CONF_DIR": str(_configuration_folder(folder, secret)),
        }
        yield _Cluster(found[1], driver, begun)
    finally:
        for daemon in begun:
            if daemon.stdin is not None:
                daemon.stdin.close()  # the workers end; srun itself would kill them on SIGTERM
                with suppress(subprocess.TimeoutExpired):
                    daemon.wait(timeout=_END_S)
        end_processes(begun[::-1], _END_S)


def _master(address: str, environment: Mapping[str, str], folder: Path) -> Daemon:
    argv = daemon_command("master", address, "--port", 0)
    return start_daemon("master", "master", guarded(argv), environment, folder / "master.log")


def _workers(trial: Trial, master: str, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start srun with a worker on each node."""
    nodes, slots = trial.placement.nodes, slots_per_node(trial)
    worker = [sys.executable, "-m", "paceline.runner.launchers.spark.standalone"]
    argv = [
        "srun", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1",
        f"--cpus-per-task={slots}", "--cpu-bind=none", "--mpi=none", "--kill-on-bad-exit=1",
        *worker, master, trial.interface, str(slots),
    ]  # fmt: skip
    return subprocess.Popen(guarded(argv), env=environment, stdin=subprocess.PIPE)


def _configuration_folder(folder: Path, secret: str) -> Path:
    """Copy Spark's configuration and add the secret, which a command line would show to others."""
    usual = os.environ.get("SPARK_CONF_DIR") or find_spark().path / "conf"
    made = folder / "conf"
    made.mkdir(mode=0o700)
    for file in Path(usual).glob("*"):
        if file.is_file():
            (made / file.name).write_bytes(file.read_bytes())
    defaults = made / "spark-defaults.conf"
    given = defaults.read_text("utf-8") if defaults.exists() else ""
    own = f"spark.authenticate true\nspark.authenticate.secret {secret}\n"
    defaults.write_text(f"{given}\n{own}", "utf-8")
    return made


if __name__ == "__main__":
    sys.exit(run_guarded(main))
