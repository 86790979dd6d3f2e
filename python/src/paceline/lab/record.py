"""What is known of a lab, kept in a file from before its first namespace until after its last.

So that whoever comes later can remove what a lab left that was killed: nothing is made that the
record, or the name alone, does not lead to.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import UsageError
from paceline.lab.settings import LabSettings

SCHEMA = 1
INTERFACE = "eth0"  # of every host, beside loopback
SPARK_PORT = 7077  # Spark's own default


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A namespace with one interface beside loopback, and a name of its own."""

    number: int
    name: str
    address: str
    namespace: str
    cores: list[int]  # of this machine; [] is all
    folder: str  # of the host alone: what it calls /tmp, and the program that enters it

    def command(self, *words: object) -> list[str]:
        """What runs `words` on this host, in its environment."""
        return ["sh", str(self.entrance), *map(str, words)]

    @property
    def entrance(self) -> Path:
        return Path(self.folder, "enter")

    @property
    def temporary(self) -> Path:
        return Path(self.folder, "tmp")


@dataclass(frozen=True, slots=True, kw_only=True)
class LabRecord:
    """A lab that is being made, is up, or was left behind."""

    schema: int
    name: str
    token: str  # tells it from a later one of the same name
    settings: LabSettings
    hosts: list[Host]
    folder: str  # everything the lab writes but logs that were asked for elsewhere
    logs: str
    # Who removes it at its end; None: it stays until somebody asks for its end.
    owner_pid: int | None
    owner_started_unix_s: float | None
    made_unix_s: float

    @property
    def hub(self) -> str:
        """The namespace of the switch."""
        return hub_of(self.name)

    @property
    def hostfile(self) -> Path:
        """Open MPI's list of the hosts and their slots."""
        return Path(self.folder, "hosts")

    @property
    def agent(self) -> Path:
        """What mpirun calls in place of ssh."""
        return Path(self.folder, "agent")

    @property
    def spark_master(self) -> str:
        """Where the master listens, if the lab has one."""
        return f"spark://{self.hosts[0].address}:{SPARK_PORT}"

    def host(self, asked: str) -> Host:
        """By number or name. Raises UsageError."""
        for host in self.hosts:
            if asked in (str(host.number), host.name):
                return host
        raise UsageError(
            f"host of lab {self.name!r}: expected a number from 0 to {len(self.hosts) - 1} or one "
            f"of {', '.join(host.name for host in self.hosts)}, got {asked!r}"
        )

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def hub_of(name: str) -> str:
    return f"paceline-{name}-hub"


def hosts_of(name: str, settings: LabSettings, folder: Path, here: list[int]) -> list[Host]:
    """The hosts that a lab of that name will have; `here`: the cores there are."""
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
    """Those of the lab of that name."""
    own = re.compile(rf"paceline-{re.escape(lab)}-(hub|\d+)")
    return [name for name in names if own.fullmatch(name)]
