"""`mpi`: mpirun, on this node or on those of a hostfile, and under schedulers.

srun: https://slurm.schedmd.com/mpi_guide.html. MPIJob: v2beta1 of
https://github.com/kubeflow/mpi-operator.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from paceline.base.errors import EnvironmentLacks
from paceline.base.host.programs import job_script
from paceline.measure.records.layout import TrialFiles
from paceline.plan.trials.trial import Trial
from paceline.runner.job.context import rank_environment
from paceline.runner.launchers.base import SHARED_MEMORY, Command, failed_rank
from paceline.runner.launchers.descriptors import MpiLaunchOptions
from paceline.runner.launchers.mpi.implementations import (
    Mpirun,
    OpenMpi5,
    find_mpirun,
    library_environment,
    mapping,
    mpi_mismatch,
    root_environment,
    unknown_parameters,
)
from paceline.runner.launchers.schedulers.files import limit_s
from paceline.runner.launchers.schedulers.kubernetes import (
    JOBS,
    KEPT_S,
    PYTHON,
    KubernetesSettings,
    apart,
    apart_labels,
    job_arguments,
    metadata,
    pod,
)
from paceline.runner.launchers.schedulers.slurm import SlurmSettings, SlurmStep
from paceline.runner.preflight.this_host import check_cores, check_trial

_SEGMENT_BYTES = 16 * 2**20  # of a rank of Open MPI 5


class MpiLauncher:
    """`mpirun … python mpi-jobs/train.py`.

    On one node, messages and PMIx use shared memory and loopback only. PRRTE's own control port
    stays open on all interfaces: Open MPI 5.0 has no option for it (open-mpi/ompi#14441).
    """

    def preflight(self, trial: Trial) -> None:
        mpirun = check_mpi(trial)
        job_script("mpi-jobs", "train.py")
        options = trial.options_as(MpiLaunchOptions)
        if options.parameters:
            _check_parameters(options.parameters, mpirun)
        if options.hostfile is not None:
            _check_hostfile(Path(options.hostfile))
        if trial.placement.nodes == 1:
            check_trial(trial)
            if isinstance(mpirun.implementation, OpenMpi5):
                _check_shared_memory(trial)
        else:
            check_cores(trial)
            _check_srun(trial)

    def command(self, trial: Trial, files: TrialFiles) -> Command:
        mpirun = find_mpirun(trial.option("mpirun"))
        environment = {**rank_environment(trial), **library_environment(mpirun)}
        argv = [str(mpirun.path), "-n", str(trial.placement.ranks)]
        argv += mpirun.implementation.arguments(trial, environment)
        argv += parameter_arguments(trial)
        script = job_script("mpi-jobs", "train.py")
        argv += [sys.executable, str(script), "--trial", str(files.trial)]
        command = Command(
            argv=tuple(argv),
            environment={**environment, **root_environment()},
            exports=partial(mpirun.implementation.exports, trial),
        )
        is_here = trial.placement.nodes == 1 and trial.option("hostfile") is None
        # ranks on other hosts would get the same folders, which do not exist there
        return replace(command, temporary=mpirun.implementation.temporary) if is_here else command

    def failed_rank(self, log_text: str) -> int | None:
        return failed_rank(log_text)


def check_mpi(trial: Trial) -> Mpirun:
    """Return the mpirun in use. Raises EnvironmentLacks without one that mpi4py fits."""
    mpirun = find_mpirun(trial.option("mpirun"))
    mismatch = mpi_mismatch(mpirun)
    if mismatch is not None:
        raise EnvironmentLacks(mismatch)
    return mpirun


def _check_shared_memory(trial: Trial) -> None:
    """Raise EnvironmentLacks if the segments of the ranks do not fit into shared memory.

    A rank would end with a signal, or without a reason.
    """
    if not SHARED_MEMORY.is_dir() or "btl" in " ".join(parameter_arguments(trial)):
        return  # segments are elsewhere, or there may be none
    ranks, free = trial.placement.ranks, shutil.disk_usage(SHARED_MEMORY).free
    if ranks > 1 and free <= ranks * _SEGMENT_BYTES:
        raise EnvironmentLacks(
            f"{SHARED_MEMORY}: Open MPI needs more than {_SEGMENT_BYTES // 2**20} MiB of shared "
            f"memory for each of {ranks} ranks, {free / 2**20:.0f} MiB are free; give the "
            "container more (docker run --shm-size=1g), or remove files from there"
        )


def _check_srun(trial: Trial, environment: Mapping[str, str] = os.environ) -> None:
    """Raise EnvironmentLacks in a Slurm allocation without srun, which mpirun calls there."""
    others = "plm" in " ".join(parameter_arguments(trial))
    if others or "SLURM_JOB_ID" not in environment or shutil.which("srun") is not None:
        return
    raise EnvironmentLacks(
        f"{trial.placement.nodes} nodes inside a Slurm allocation (SLURM_JOB_ID): expected srun in "
        "PATH, with which mpirun starts its daemons on the other nodes, found none (a container "
        "without Slurm's programs?); add its folder to PATH, or start the daemons by ssh with "
        '[mpi] arguments = ["--prtemca", "plm", "ssh"]'
    )


def _check_parameters(names: Iterable[str], mpirun: Mpirun) -> None:
    if mpirun.implementation.abi != "openmpi":
        raise EnvironmentLacks(
            f"mpi_parameters: expected an Open MPI, {mpirun.path} belongs to "
            f"{mpirun.implementation.name}, which has no MCA parameters; remove them, or choose "
            "another mpirun with [mpi] mpirun"
        )
    unknown = unknown_parameters(names, mpirun.path)
    if unknown is not None:
        raise EnvironmentLacks(f"mpi_parameters: {unknown}")


def parameter_arguments(trial: Trial) -> list[str]:
    """Return the trial's MCA parameters, then the spec's own arguments of mpirun."""
    options = trial.options_as(MpiLaunchOptions)
    given = sorted(options.parameters.items())
    words = [word for name, value in given for word in ("--mca", name, value)]
    return [*words, *options.arguments]


def _check_hostfile(path: Path) -> None:
    try:
        path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise EnvironmentLacks(f"hostfile {path}: expected a readable file: {error}") from error


_SSH_DIR = "/home/paceline/.ssh"
_SSH_PORT = 2222  # an ordinary user may listen there
_SSH_ATTEMPTS = 30
_SRUN_MPI = "pmix"
_HOSTFILE = "/etc/mpi/hostfile"  # the MPI operator writes it
_IMAGE = "paceline-mpi"
_INTERFACE = "btl_tcp_if_include"  # MCA parameter of Open MPI 4 and 5


def slurm_step(trial: Trial, settings: SlurmSettings) -> SlurmStep:
    """Return one task per rank.

    Without pmix, or what the site's MPI needs in its place, every task would be an MPI world of its
    own. Ranks pin themselves. Since Slurm 22.05 a step does not inherit its job's number of CPUs
    per task.
    """
    threads = trial.placement.threads_per_rank
    own = [f"mpi={_SRUN_MPI}", "cpu-bind=none", f"cpus-per-task={threads}"]
    # srun takes the last of equal options.
    srun = shlex.join(["srun", *(f"--{option}" for option in (*own, *settings.srun_options))])
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
    launcher = pod("launcher", _IMAGE, _mpirun(trial, settings), trial, settings, has_ranks=False)
    worker = pod("worker", _IMAGE, _sshd(), trial, settings)
    worker["metadata"] = {"labels": apart_labels(trial)}
    worker["spec"]["affinity"] = apart(trial)
    # The launcher waits for workers that are ready: those whose ssh server answers.
    worker["spec"]["containers"][0]["readinessProbe"] = {
        "tcpSocket": {"port": _SSH_PORT},
        "periodSeconds": 2,
    }
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
                "ttlSecondsAfterFinished": KEPT_S,
            },
            "launcherCreationPolicy": "WaitForWorkersReady",
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
    # A worker that is ready may not have its name in the cluster's DNS yet. ssh tries again once a
    # second; a retry of the whole pod could repeat steps.
    ssh = (
        f"-p {_SSH_PORT} -o ConnectionAttempts={_SSH_ATTEMPTS} -o StrictHostKeyChecking=no "
        "-o UserKnownHostsFile=/dev/null"
    )
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
