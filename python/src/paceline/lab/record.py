"""The description of a lab, which a file keeps from before its first namespace to after its last.

With it, a later process can remove the remains of a lab whose process was killed. Everything that
a lab makes can be found by its record or by its name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import UsageError
from paceline.host.processes import Process
from paceline.lab.settings import LabSettings

SCHEMA = 2
INTERFACE = "eth0"  # the interface of every host, besides loopback
SPARK_PORT = 7077  # Spark's own default


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A simulated host: a namespace with a host name and one interface besides loopback."""

    number: int
    name: str
    address: str
    namespace: str
    cores: list[int]  # cores of this machine; [] means all
    folder: str  # holds the host's temporary folder and the script that runs commands on it

    def command(self, *words: object) -> list[str]:
        """Return the command that runs `words` on this host, in its environment."""
        return ["sh", str(self.entrance), *map(str, words)]

    @property
    def entrance(self) -> Path:
        return Path(self.folder, "enter")

    @property
    def temporary(self) -> Path:
        return Path(self.folder, "tmp")


@dataclass(frozen=True, slots=True, kw_only=True)
class LabRecord:
    """A lab that is being made, is up, or was abandoned."""

    schema: int
    name: str
    token: str  # distinguishes it from a later lab of the same name
    settings: LabSettings
    hosts: list[Host]
    folder: str  # all files of the lab, except logs with a folder of their own
    logs: str
    # The process that removes the lab at its end; None: `paceline lab down` removes it.
    owner: Process | None
    made_unix_s: float

    @property
    def hub(self) -> str:
        """Return the name of the namespace of the switch."""
        return hub_of(self.name)

    @property
    def hostfile(self) -> Path:
        """Return the path of the host list for Open MPI, with slots."""
        return Path(self.folder, "hosts")

    @property
    def agent(self) -> Path:
        """Return the path of the program that replaces ssh for mpirun."""
        return Path(self.folder, "agent")

    @property
    def spark_master(self) -> str:
        """Return the address of the Spark master, if the lab has one."""
        return f"spark://{self.hosts[0].address}:{SPARK_PORT}"

    def host(self, asked: str) -> Host:
        """Find a host by number or name. Raises UsageError."""
        for host in self.hosts:
            if asked in (str(host.number), host.name):
                return host
        raise UsageError(
            f"host of lab {self.name!r}: expected a number from 0 to {len(self.hosts) - 1} or one "
            f"of {', '.join(host.name for host in self.hosts)}, got {asked!r}"
        )


def hub_of(name: str) -> str:
    return f"paceline-{name}-hub"


def hosts_of(name: str, settings: LabSettings, folder: Path, here: list[int]) -> list[Host]:
    """Describe the hosts of a lab before it is made. here: the available cores."""
    return [
        Host(
            number=number,
            name=f"{name}-{number}",
            address=f"10.77.0.{number + 1}",
            namespace=f"paceline-{name}-{number}",
            cores=settings.cores_of(number, here),
            folder=str(folder / str(number)),
        )
        for number in range(settings.hosts)
    ]


def namespaces_among(names: list[str], lab: str) -> list[str]:
    """Select the namespaces of the lab with that name."""
    own = re.compile(rf"paceline-{re.escape(lab)}-(hub|\d+)")
    return [name for name in names if own.fullmatch(name)]
