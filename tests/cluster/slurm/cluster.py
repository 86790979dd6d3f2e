"""A real Slurm on the hosts of a lab: munged and slurmctld on the first, slurmd on each.

Each host has network and host name of its own, so all daemons use their usual ports. Files and the
socket of munged are in the lab's folder, which ends with the lab.
"""

from __future__ import annotations

import os
import secrets
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tests.support.commands import run_command
from tests.support.environment import kept_environment

from paceline.base.host.processes import end_processes
from paceline.collectives.host import wait_until

if TYPE_CHECKING:
    from paceline.runner.lab import Lab

# A busy machine starts the daemons within seconds.
_START_S = 60.0
_END_S = 10.0
_CALL_S = 60.0
# Until a job in the queue has run; a job on a busy machine trains for 10 to 20 s.
_JOB_S = 180.0
_STILL_THERE = {"PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED"}
# https://slurm.schedmd.com/slurm.conf.html. Lab hosts have no control groups of their own.
_CONFIGURATION = """\
ClusterName={name}
SlurmctldHost={first.name}({first.address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
TmpFS={folder}/tmp-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
MpiDefault=none
ReturnToService=2
KillWait=5
"""


@dataclass(frozen=True, slots=True)
class Slurm:
    """Calls programs on the first host, as a user on a head node does.

    They have only the variables in `environment`: without those of a lab, which help MPI and Spark.
    """

    lab: Lab
    folder: Path
    environment: Mapping[str, str]

    def call(
        self, *words: object, limit_s: float = _CALL_S, cwd: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on the first host and return how it ended."""
        variables = [f"{name}={value}" for name, value in self.environment.items()]
        command = self.lab.hosts[0].command("env", "-i", *variables, *words)
        return run_command(command, limit_s, cwd=cwd)

    def output(self, *words: object, cwd: Path | None = None) -> str:
        """Run a command that must end well; return what it prints."""
        ended = self.call(*words, cwd=cwd)
        assert ended.returncode == 0, f"{words}: {ended.stdout}{ended.stderr}{self.logs()}"
        return ended.stdout

    def submit(self, file: Path, *options: object) -> int:
        """Submit a job script from its own folder; return the number of the job."""
        return int(self.output("sbatch", "--parsable", *options, file.name, cwd=file.parent))

    def state(self, job: int) -> str:
        """Return the state of a job, of an array the first state of a task that is not done."""
        states = self.output("squeue", "--noheader", "--states=all", f"--jobs={job}", "-o", "%T")
        words = states.split()
        return next((word for word in words if word in _STILL_THERE), words[0])

    def wait_for_end(self, *jobs: int, limit_s: float = _JOB_S) -> list[str]:
        """Wait until the jobs have ended; return their states."""

        def ended() -> bool:
            return not any(self.state(job) in _STILL_THERE for job in jobs)

        assert wait_until(ended, limit_s, poll_s=0.2), self.logs()
        return [self.state(job) for job in jobs]

    def is_ready(self) -> bool:
        found = self.call("sinfo", "--noheader", "-o", "%D %t")
        return found.returncode == 0 and found.stdout.split() == [str(len(self.lab.hosts)), "idle"]

    def logs(self) -> str:
        return "\n".join(
            f"{log.name}:\n{log.read_text()[-3000:]}" for log in sorted(self.folder.glob("*.log"))
        )


@contextmanager
def slurm_on(lab: Lab) -> Iterator[Slurm]:
    """Start Slurm on the hosts of a lab; yield when all nodes are idle."""
    folder = Path(lab.record.folder, "slurm")
    for name in ("state", "tmp"):
        (folder / name).mkdir(parents=True)
    for host in lab.hosts:
        (folder / f"tmp-{host.name}").mkdir()
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o600)
    (folder / "slurm.conf").write_text(_configuration(lab, folder), "utf-8")
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n", "utf-8")
    environment = kept_environment(
        SLURM_CONF=str(folder / "slurm.conf"), TMPDIR=str(folder / "tmp")
    )
    slurm = Slurm(lab, folder, environment)
    daemons: list[subprocess.Popen[bytes]] = []

    def start(host: int, *words: object) -> None:
        with (folder / "daemons.log").open("ab") as log:
            command = lab.hosts[host].command(*words)
            daemons.append(
                subprocess.Popen(
                    command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
                )
            )

    try:
        # --force: the lab's folder belongs to the user of the tests, not to munge.
        start(
            0, "munged", "--foreground", "--force", "--num-threads=1", f"--key-file={key}",
            f"--socket={folder}/munge.socket", f"--pid-file={folder}/munged.pid",
            f"--log-file={folder}/munged.log", f"--seed-file={folder}/munged.seed",
        )  # fmt: skip
        assert wait_until((folder / "munge.socket").exists, _START_S), slurm.logs()
        start(0, "slurmctld", "-D")
        for host in lab.hosts:
            start(host.number, "slurmd", "-D", "-N", host.name)
        assert wait_until(slurm.is_ready, _START_S, poll_s=0.2), slurm.logs()
        yield slurm
    finally:
        end_processes(daemons[::-1], _END_S)


def _configuration(lab: Lab, folder: Path) -> str:
    cpus = len(os.sched_getaffinity(0))
    head = _CONFIGURATION.format(name=lab.record.name, first=lab.hosts[0], folder=folder)
    nodes = [
        f"NodeName={host.name} NodeHostname={host.name} NodeAddr={host.address} CPUs={cpus}"
        for host in lab.hosts
    ]
    return "\n".join([head, *nodes, "PartitionName=all Nodes=ALL Default=YES", ""])
