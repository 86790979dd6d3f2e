"""The files of a lab: programs that run a command on a host, and the host list of mpirun."""

from __future__ import annotations

import shlex
from pathlib import Path

from paceline.measure.records.files import write_text
from paceline.runner.lab.record import INTERFACE, NAME_VARIABLE, Host, LabRecord

# With these options a killed JVM leaves no file in /tmp, and its start takes half the CPU time.
_JVM = "-XX:-UsePerfData -XX:TieredStopAtLevel=1 -XX:+UseSerialGC"

# The master stops using a host this long after its last heartbeat. Spark's default is a minute, in
# which it may start executors there. Workers report four times in it.
_WORKER_TIMEOUT = "-Dspark.worker.timeout=20"


def write(record: LabRecord) -> None:
    """Make the folders and the files of the lab, except logs."""
    folder = Path(record.folder)
    folder.mkdir(
        mode=0o700
    )  # an error if it exists, because the end of the lab removes it with its content
    Path(record.logs).mkdir(parents=True, exist_ok=True)
    for host in record.hosts:
        host.temporary.mkdir(parents=True)
        write_text(host.entrance, entrance(record, host))
    write_text(record.hostfile, hostfile(record))
    write_text(record.agent, agent(record))
    record.agent.chmod(0o755)


def entrance(record: LabRecord, host: Host) -> str:
    """Return a shell script that runs its arguments, or a shell, on the host."""
    words = ["ip", "netns", "exec", host.namespace, "unshare", "--uts"]
    if host.cores:
        words += ["taskset", "--cpu-list", ",".join(map(str, host.cores))]
    settings = "".join(
        f"export {name}={shlex.quote(value)}\n" for name, value in environment(record, host).items()
    )
    settings += "".join(
        f'export {name}="${{{name}:-}} "{shlex.quote(value)}\n'
        for name, value in jvm_options(host).items()
    )
    return (
        f"#!/bin/sh\n# Runs a command on host {host.name} of lab {record.name}.\n{settings}"
        f'[ $# -gt 0 ] || set -- "${{SHELL:-sh}}"\n'
        f'exec {shlex.join(words)} sh -c \'hostname {host.name} && exec "$@"\' sh "$@"\n'
    )


def environment(record: LabRecord, host: Host) -> dict[str, str]:
    """Return the variables of processes on the host.

    They hold the paths and addresses of the lab, and settings with which Spark and MPI need
    neither a name service nor ssh.
    """
    temporary = str(host.temporary)
    found = {
        "TMPDIR": temporary,
        NAME_VARIABLE: record.name,
        "PACELINE_LAB_HOSTS": ",".join(host.address for host in record.hosts),
        "PACELINE_LAB_INTERFACE": INTERFACE,
        "PACELINE_LAB_HOSTFILE": str(record.hostfile),
        "PACELINE_LAB_AGENT": str(record.agent),
        "SPARK_LOCAL_HOSTNAME": host.address,
        "SPARK_LOCAL_DIRS": temporary,
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        # mpirun of Open MPI 5, Open MPI 4 and MPICH
        "PRTE_MCA_plm_ssh_agent": str(record.agent),
        "OMPI_MCA_plm_rsh_agent": str(record.agent),
        "HYDRA_LAUNCHER": "ssh",
        "HYDRA_LAUNCHER_EXEC": str(record.agent),
        "PRTE_MCA_prte_if_include": INTERFACE,
        "OMPI_MCA_btl_tcp_if_include": INTERFACE,
    }
    if record.settings.spark:
        found["PACELINE_LAB_SPARK_MASTER"] = record.spark_master
    return found


def jvm_options(host: Host) -> dict[str, str]:
    """Return the variables with options of JVMs on the host; a user's own options come first."""
    folder = f"-Djava.io.tmpdir={host.temporary}"
    return {
        "SPARK_SUBMIT_OPTS": f"-XX:-UsePerfData {folder}",
        "SPARK_DAEMON_JAVA_OPTS": f"{_JVM} {_WORKER_TIMEOUT} {folder}",
    }


def hostfile(record: LabRecord) -> str:
    slots = record.settings.slots_per_host()
    return "".join(f"{host.address} slots={slots}\n" for host in record.hosts)


def agent(record: LabRecord) -> str:
    """Return a shell script that replaces ssh: `agent [-x] ADDRESS COMMAND…`, as MPICH calls it."""
    cases = "".join(
        f'{host.address}) exec {shlex.join(host.command("sh", "-c"))} "$*" ;;\n'
        for host in record.hosts
    )
    skip_option = '[ "$1" = -x ] && shift\n'
    return f"#!/bin/sh\n{skip_option}address=$1\nshift\ncase $address in\n{cases}esac\nexit 1\n"
