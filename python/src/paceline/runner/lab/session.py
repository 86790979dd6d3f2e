"""The lifetime of a lab, and of a host that loses its power and comes back."""

from __future__ import annotations

import dataclasses
import os
import secrets
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from paceline.base.errors import EnvironmentLacks, TimedOut, UsageError
from paceline.base.host.processes import kill_until_gone, send
from paceline.collectives.host import Process
from paceline.runner.lab import network, turns
from paceline.runner.lab.network import FOLDER_PREFIX, remove, remove_abandoned
from paceline.runner.lab.record import (
    NAME_VARIABLE,
    SCHEMA,
    SPARK_PORT,
    Host,
    LabRecord,
    LabSettings,
    Registry,
    check_name,
    hosts_of,
)
from paceline.runner.launchers.spark.standalone import (
    Daemon,
    Kind,
    daemon_command,
    daemon_environment,
    start_daemon,
    wait_for,
)

_REAPED_S = 10.0


class Lab:
    """Hosts on this machine; the end of a `with` block removes them and their processes.

        with Lab(LabSettings(hosts=2, bandwidth="1gbit")) as lab:
            subprocess.run(lab.hosts[0].command("ping", "-c", 1, lab.hosts[1].address))

    name: part of the names of hosts and namespaces; None chooses an unused name.
    logs: folder for the logs of Spark; None: the folder of the lab, which is removed at the end.
    """

    def __init__(
        self,
        settings: LabSettings | None = None,
        *,
        name: str | None = None,
        logs: Path | None = None,
    ) -> None:
        self.record = _planned(settings or LabSettings(), name, logs)
        self.registry = Registry()
        self._begun: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        self.make()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def hosts(self) -> list[Host]:
        return self.record.hosts

    @property
    def agent(self) -> Path:
        """Return the program for `mpirun --prtemca plm_ssh_agent`; the hosts use it by default."""
        return self.record.agent

    @property
    def hostfile(self) -> Path:
        return self.record.hostfile

    @property
    def spark_master(self) -> str:
        """Return the address of the Spark master. Raises UsageError in a lab without Spark."""
        if not self.record.settings.spark:
            raise UsageError(f"lab {self.record.name!r} has no Spark; make it with spark=True")
        return self.record.spark_master

    def make(self) -> list[str]:
        """Make the lab; return the names of abandoned labs that were removed before.

        Raises EnvironmentLacks, TimedOut, and UsageError if a lab of this name is up. After an
        error nothing is left of the lab.
        """
        reason = network.why_not()
        if reason is not None:
            raise EnvironmentLacks(f"no lab can be made here: {reason}")
        if self.record.settings.turns and (lacking := turns.why_no_turns()) is not None:
            raise EnvironmentLacks(f"hosts cannot take turns here: {lacking}")
        abandoned = self._register()
        try:
            network.write_programs(self.record)
            network.make(self.record)
            if self.record.settings.turns:
                self._begun.append(turns.start(self.record))
            if self.record.settings.spark:
                start_spark(self.record, self._begun)
        except BaseException:
            self.close()
            raise
        return abandoned

    def leave(self) -> None:
        """Keep the lab after this process ends, until `paceline lab down`."""
        with self.registry.locked():
            self.record = dataclasses.replace(self.record, owner=None)
            self.registry.save(self.record)

    def close(self) -> None:
        """End the processes and remove the lab; safe to repeat. Raises TimedOut."""
        remove(self.record.name, self.registry, token=self.record.token)
        for process in self._begun:
            process.wait(timeout=_REAPED_S)

    def shape(self, rate: str | None) -> None:
        """Change the rate of all links, in the format of `LabSettings.bandwidth`."""
        network.shape(self.record, rate)

    def cut(self, host: Host, where: network.End = "cable") -> None:
        """Take a host's link down, at the host's end or at the switch's end."""
        network.cut(self.record, host, where)

    def restore(self, host: Host) -> None:
        """Bring a host's link up again."""
        network.restore(self.record, host)

    def _register(self) -> list[str]:
        name = self.record.name
        with self.registry.locked():
            abandoned = remove_abandoned(self.registry)
            if self.registry.file(name).exists():
                raise UsageError(
                    f"lab {name!r} is up already; `paceline lab down --name {name}` removes it, "
                    "or choose another --name"
                )
            if Path(self.record.folder).exists():  # it may belong to another program
                raise EnvironmentLacks(
                    f"{self.record.folder}: expected nothing there, it is the lab's folder; remove "
                    "it, or choose another --name"
                )
            self.registry.save(self.record)
        return abandoned


def _planned(settings: LabSettings, name: str | None, logs: Path | None) -> LabRecord:
    settings.check()
    name = name or f"l{secrets.token_hex(3)}"
    check_name(name)
    folder = Path(tempfile.gettempdir(), f"{FOLDER_PREFIX}{name}").resolve()
    return LabRecord(
        schema=SCHEMA,
        name=name,
        token=secrets.token_hex(8),
        settings=settings,
        hosts=hosts_of(name, settings, folder, sorted(os.sched_getaffinity(0))),
        folder=str(folder),
        logs=str(logs.resolve() if logs is not None else folder / "logs"),
        owner=Process.current(),
    )


_KILL_S = 10.0


def own_lab() -> LabRecord | None:
    """Return the lab that this process is in; None outside of labs."""
    name = os.environ.get(NAME_VARIABLE)
    return None if name is None else Registry().load(name)


def check_turns() -> None:
    """Raises EnvironmentLacks if this process is on a host that should take turns and does not."""
    lab = own_lab()
    if lab is not None and lab.settings.turns and not turns.are_taken(lab.name):
        raise EnvironmentLacks(
            f"lab {lab.name}: the scheduler of its turns has ended, and all hosts run at once; "
            f"make the lab again, then --resume the run. Its log: {turns.said(lab) or 'empty'}"
        )


@contextmanager
def links_at(rate: str | None) -> Iterator[None]:
    """Give all links of the lab that this process is in another rate; None changes nothing.

    Raises EnvironmentLacks outside of labs.
    """
    if rate is None:
        yield
        return
    lab = own_lab()
    if lab is None:
        raise EnvironmentLacks(f"link {rate}: expected hosts of a lab, whose links have any rate")
    network.shape(lab, rate)
    try:
        yield
    finally:
        network.shape(lab, lab.settings.bandwidth)


def crash(record: LabRecord, host: Host) -> None:
    """Take the host's link down and stop all its processes, until `boot`.

    The processes end at `boot` only: mpirun's agent is a child of mpirun on another host, which
    would notice its end at once. Nobody notices the end of a process on a host without power.
    """
    network.cut(record, host)
    stopped: set[int] = set()
    while running := network.processes_in(host.namespace) - stopped:  # some may have forked
        send(running, signal.SIGSTOP)
        stopped |= running


def boot(record: LabRecord, host: Host) -> None:
    """Kill all processes of the host, then bring its link up, and start a Spark worker if the lab
    has Spark.

    Returns before the worker is registered. Raises TimedOut if a process does not end.
    """
    if not kill_until_gone(lambda: network.processes_in(host.namespace), _KILL_S):
        raise TimedOut(f"processes of host {host.name} are alive {_KILL_S:g} s after SIGKILL")
    network.restore(record, host)
    if record.settings.spark:
        start_worker(record, host)


# A Spark standalone cluster on the hosts of a lab: a master on the first, a worker on each

START_S = 90.0


def start_spark(record: LabRecord, begun: list[subprocess.Popen[bytes]]) -> None:
    """Start the cluster and return when all workers are registered.

    Each process is added to `begun` as soon as it is started. Raises EnvironmentLacks with the end
    of the log if a daemon ends, and TimedOut after START_S in the time of the hosts.
    """
    limit_s = START_S * record.settings.dilation
    deadline = time.monotonic() + limit_s
    master = _start(record, record.hosts[0], "master", "master", "--port", SPARK_PORT)
    begun.append(master.process)
    wait_for([master], limit_s)  # a worker that finds no master retries only after seconds
    workers = []
    for host in record.hosts:
        worker = start_worker(record, host)
        begun.append(worker.process)
        workers.append(worker)
    wait_for(workers, deadline - time.monotonic())


def start_worker(record: LabRecord, host: Host) -> Daemon:
    """Start the worker of a host; return at once."""
    slots, name = record.settings.slots_per_host(), f"worker-{host.number}"
    return _start(
        record, host, "worker", name,
        "--cores", slots, "--memory", f"{slots + 1}g",
        "--work-dir", Path(record.logs, name), record.spark_master,
    )  # fmt: skip


def _start(record: LabRecord, host: Host, kind: Kind, name: str, *options: object) -> Daemon:
    command = host.command(*daemon_command(kind, host.address, *options))
    return start_daemon(kind, name, command, daemon_environment(), Path(record.logs, f"{name}.log"))
