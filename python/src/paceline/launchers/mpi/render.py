"""Launcher `mpi` under schedulers: srun, and the MPIJob of the Kubeflow MPI operator.

srun: https://slurm.schedmd.com/mpi_guide.html. MPIJob: v2beta1 of
https://github.com/kubeflow/mpi-operator.
"""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

from paceline.host.programs import job_script
from paceline.job.environment import rank_environment
from paceline.launchers.mpi.descriptor import MpiLaunchOptions
from paceline.launchers.mpi.implementations import OpenMpi5, mapping
from paceline.launchers.mpi.launcher import parameter_arguments
from paceline.launchers.schedulers.files import limit_s
from paceline.launchers.schedulers.kubernetes import JOBS, PYTHON, job_arguments, metadata, pod
from paceline.launchers.schedulers.slurm import SlurmStep

if TYPE_CHECKING:
    from paceline.launchers.schedulers.kubernetes import KubernetesSettings
    from paceline.launchers.schedulers.slurm import SlurmSettings
    from paceline.plan.trial import Trial

_SSH_DIR = "/home/paceline/.ssh"
_SSH_PORT = 2222  # an ordinary user may listen there
_HOSTFILE = "/etc/mpi/hostfile"  # the MPI operator writes it
_IMAGE = "paceline-mpi"
_INTERFACE = "btl_tcp_if_include"  # MCA parameter of Open MPI 4 and 5


def slurm_step(trial: Trial, settings: SlurmSettings) -> SlurmStep:
    """Return one task per rank.

    Without pmix every task would be an MPI world of its own. Ranks pin themselves. Since Slurm
    22.05 a step does not inherit its job's number of CPUs per task.
    """
    threads = trial.placement.threads_per_rank
    srun = f"srun --mpi=pmix --cpu-bind=none --cpus-per-task={threads}"
    script = str(job_script("mpi-jobs", "train.py"))
    given = trial.options_as(MpiLaunchOptions).parameters
    if trial.placement.nodes > 1:
        given = {_INTERFACE: trial.interface, **given}
    parameters = {f"OMPI_MCA_{name}": value for name, value in given.items()}
    return SlurmStep(
        command=f"{srun} {shlex.join([settings.python, script])}",
        tasks_per_node=trial.placement.ranks_per_node,
        cpus_per_task=threads,
        environment=parameters,
    )


def kubernetes_object(trial: Trial, settings: KubernetesSettings) -> dict[str, Any]:
    """Return an MPIJob: one worker per node, and a launcher with mpirun."""
    place = trial.placement
    launcher = pod("launcher", _IMAGE, _mpirun(trial, settings), trial, settings, ranks=1, cores=1)
    worker = pod(
        "worker", _IMAGE, _sshd(), trial, settings,
        ranks=place.ranks_per_node, cores=place.cores_per_node,
    )  # fmt: skip
    return {
        "apiVersion": "kubeflow.org/v2beta1",
        "kind": "MPIJob",
        "metadata": metadata(trial, settings),
        "spec": {
            "slotsPerWorker": place.ranks_per_node,
            "runPolicy": {
                "cleanPodPolicy": "Running",
                "backoffLimit": 0,
                "activeDeadlineSeconds": limit_s(trial),
            },
            "sshAuthMountPath": _SSH_DIR,
            "mpiImplementation": "OpenMPI",
            "mpiReplicaSpecs": {
                "Launcher": {"replicas": 1, "restartPolicy": "Never", "template": launcher},
                "Worker": {"replicas": place.nodes, "restartPolicy": "Never", "template": worker},
            },
        },
    }


def _mpirun(trial: Trial, settings: KubernetesSettings) -> list[str]:
    place = trial.placement
    ssh = f"-p {_SSH_PORT} -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null"
    command = ["mpirun", "-n", str(place.ranks), "--hostfile", _HOSTFILE]
    command += ["--map-by", mapping(place)]
    command += ["--bind-to", "none", "--prtemca", "plm_ssh_args", ssh]
    command += (
        OpenMpi5().interface_parameters(trial) if place.nodes > 1 else ["--mca", "btl", "self,sm"]
    )
    for name in rank_environment(trial):
        command += ["-x", name]
    command += [*parameter_arguments(trial), PYTHON, f"{JOBS}/mpi-jobs/train.py"]
    return command + job_arguments(trial, settings)


def _sshd() -> list[str]:
    """Return an ssh server for an ordinary user, with the keys that the operator creates.

    Debian's PATH does not have our environment.
    """
    options = {
        "HostKey": f"{_SSH_DIR}/id_rsa",
        "AuthorizedKeysFile": f"{_SSH_DIR}/authorized_keys",
        "PidFile": "/tmp/sshd.pid",  # noqa: S108  (in a pod of its own)
        "StrictModes": "no",
        "UsePAM": "no",
        "PasswordAuthentication": "no",
        "SetEnv": "PATH=/opt/paceline/venv/bin:/usr/local/bin:/usr/bin:/bin",
    }
    command = ["/usr/sbin/sshd", "-D", "-e", "-f", "/dev/null", "-p", str(_SSH_PORT)]
    for name, value in options.items():
        command += ["-o", f"{name}={value}"]
    return command
