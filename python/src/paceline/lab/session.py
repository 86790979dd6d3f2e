"""A lab from its making to its end."""

from __future__ import annotations

import dataclasses
import os
import secrets
import subprocess
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Self

from paceline.errors import EnvironmentLacks, UsageError
from paceline.host.processes import process_started_unix_s
from paceline.lab import network, programs, spark
from paceline.lab.record import SCHEMA, Host, LabRecord, hosts_of
from paceline.lab.registry import Registry
from paceline.lab.removal import FOLDER_PREFIX, remove, remove_abandoned
from paceline.lab.settings import LabSettings, check_name, why_not

if TYPE_CHECKING:
    from types import TracebackType

_REAPED_S = 10.0


class Lab:
    """Hosts on this machine, gone with everything in them at the end of a `with`.

        with Lab(LabSettings(hosts=2, bandwidth="1gbit")) as lab:
            subprocess.run(lab.hosts[0].command("ping", "-c", 1, lab.hosts[1].address))

    name: part of the names of hosts and namespaces; None takes one that nobody has.
    logs: where Spark's daemons and executors write; None: with the rest, so gone at the end.
    """

    def __init__(
        self,
        settings: LabSettings | None = None,
        *,
        name: str | None = None,
        logs: Path | None = None,
        registry: Registry | None = None,
    ) -> None:
        self.record = _planned(settings or LabSettings(), name, logs)
        self.registry = registry or Registry()
        self._begun: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        self.make()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def hosts(self) -> list[Host]:
        return self.record.hosts

    @property
    def agent(self) -> Path:
        """For `mpirun --prtemca plm_ssh_agent AGENT`; set on the hosts already."""
        return self.record.agent

    @property
    def hostfile(self) -> Path:
        return self.record.hostfile

    @property
    def spark_master(self) -> str:
        """Raises UsageError in a lab without Spark."""
        if not self.record.settings.spark:
            raise UsageError(f"lab {self.record.name!r} has no Spark; make it with spark=True")
        return self.record.spark_master

    def make(self) -> list[str]:
        """Bring it up; the names of labs whose makers were killed, removed before.

        Raises EnvironmentLacks, UsageError if a lab of the name is up, TimedOut; then nothing is
        left of it.
        """
        reason = why_not()
        if reason is not None:
            raise EnvironmentLacks(f"no lab can be made here: {reason}")
        abandoned = self._register()
        try:
            programs.write(self.record)
            network.make(self.record)
            if self.record.settings.spark:
                spark.start(self.record, self._begun)
        except BaseException:
            self.close()
            raise
        return abandoned

    def leave(self) -> None:
        """Let it stay after this process, until somebody asks for its end."""
        with self.registry.locked():
            self.record = dataclasses.replace(
                self.record, owner_pid=None, owner_started_unix_s=None
            )
            self.registry.save(self.record)

    def close(self) -> None:
        """End its processes and remove it; again does no harm. Raises TimedOut."""
        remove(self.record.name, self.registry, token=self.record.token)
        for process in self._begun:
            process.wait(timeout=_REAPED_S)

    def shape(self, rate: str | None) -> None:
        """Change the speed of all links, as `LabSettings.bandwidth` says it."""
        network.shape(self.record, rate)

    def cut(self, host: Host, where: network.End = "cable") -> None:
        """Take a host's link down, at its own end or at the switch's."""
        network.cut(self.record, host, where)

    def mend(self, host: Host) -> None:
        network.mend(self.record, host)

    def processes_on(self, host: Host) -> set[int]:
        """Their process ids on this machine."""
        return network.processes_in(host.namespace)

    def _register(self) -> list[str]:
        name = self.record.name
        with self.registry.locked():
            abandoned = remove_abandoned(self.registry)
            if self.registry.file(name).exists():
                raise UsageError(
                    f"lab {name!r} is up already; `paceline lab down --name {name}` removes it, "
                    "or choose another --name"
                )
            if Path(self.record.folder).exists():  # whose it is we do not know
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
        owner_pid=os.getpid(),
        owner_started_unix_s=process_started_unix_s(os.getpid()),
        made_unix_s=time.time(),
    )
