"""The description of a lab, and its file, from before its first namespace to after its last.

With it, a later process can remove the remains of a lab whose process was killed. Everything that
a lab makes can be found by its record or by its name.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from paceline.base.errors import DataError, EnvironmentLacks, UsageError
from paceline.base.host.locks import exclusive_lock
from paceline.collectives.host import Process
from paceline.measure.records.files import read_json, typed, write_json
from paceline.plan.spec.models import TrialRequest
from paceline.plan.spec.values import bits_per_s

NAME_VARIABLE = "PACELINE_LAB"  # set in all processes of a lab
MOST_HOSTS = 64
SHORTEST_SLICE_MS, LONGEST_SLICE_MS = 1, 20
CHANGE_MS = 0.25  # from one host to the next; freezing takes 0.1 to 0.3 ms
_NAME = re.compile(r"[a-z][a-z0-9-]{0,30}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LabSettings:
    """Settings of hosts that can reach each other, but nothing else.

    cores: exclusive cores of each host; None: all hosts share the cores of this machine.
    slots: ranks or Spark cores that a host offers; None: the number of its cores.
    bandwidth: maximum rate of each host in each direction, such as "1gbit" or "1 Gbit/s"; None:
    no limit.
    turns: each host has `cores`, the same ones, and the hosts run one after the other for
    `slice_ms`; everything takes as many times longer as there are hosts.
    spark: start a standalone master on the first host and a worker on each host.
    """

    hosts: int = 2
    cores: int | None = None
    slots: int | None = None
    bandwidth: str | None = None
    turns: bool = False
    slice_ms: int = 1
    spark: bool = False

    def check(self) -> None:
        """Raise UsageError if a value is not allowed."""
        if not 1 <= self.hosts <= MOST_HOSTS:
            raise UsageError(f"hosts of a lab: expected 1 to {MOST_HOSTS}, got {self.hosts}")
        for name, value in (("cores", self.cores), ("slots", self.slots)):
            if value is not None and value < 1:
                raise UsageError(f"{name} of a host: expected at least 1, got {value}")
        if self.bandwidth is not None:
            bits_per_s(self.bandwidth)
        if self.turns:
            self._check_turns()

    def _check_turns(self) -> None:
        if self.hosts < 2:
            raise UsageError(f"turns need at least 2 hosts, got {self.hosts}")
        if self.cores is None:
            raise UsageError("hosts that take turns need a number of cores, for example cores = 2")
        if self.bandwidth is None:
            raise UsageError(
                "hosts that take turns need a bandwidth, for example 1gbit: a link without a limit "
                "cannot be slowed"
            )
        if not SHORTEST_SLICE_MS <= self.slice_ms <= LONGEST_SLICE_MS:
            raise UsageError(
                f"slice of a host: expected {SHORTEST_SLICE_MS} to {LONGEST_SLICE_MS} ms, got "
                f"{self.slice_ms}"
            )

    @property
    def dilation(self) -> int:
        """Return how many times longer everything takes than on hosts of their own."""
        return self.hosts if self.turns else 1

    @property
    def link_slowdown(self) -> float:
        """Return how many times slower a link is than its rate.

        It goes on while hosts change, when no host computes.
        """
        return self.dilation * (1 + CHANGE_MS / self.slice_ms) if self.turns else 1.0

    def slots_per_host(self) -> int:
        """Return the slots of a host for the host list and the Spark workers."""
        return self.slots or self.cores or len(os.sched_getaffinity(0))

    def cores_of(self, number: int, here: list[int]) -> list[int]:
        """Select the cores of host `number` from `here`; [] if the hosts share all cores.

        Raises EnvironmentLacks if there are too few cores for all hosts.
        """
        if self.cores is None:
            return []
        if self.turns and self.cores <= len(here):
            return here[: self.cores]
        if self.turns:
            raise EnvironmentLacks(
                f"a host with {self.cores} cores was requested, this process may use {len(here)}"
            )
        if self.hosts * self.cores > len(here):
            raise EnvironmentLacks(
                f"a lab of {self.hosts} hosts with {self.cores} cores each needs "
                f"{self.hosts * self.cores}, this process may use {len(here)}; request fewer, or "
                "omit cores, so that all hosts share them"
            )
        return here[number * self.cores : (number + 1) * self.cores]


def settings_for(
    trials: Iterable[TrialRequest], *, cores: int, bandwidth: str, slice_ms: int, here: int
) -> LabSettings:
    """Return the settings of a lab for an experiment: as many hosts as a trial has nodes.

    cores: of each host. here: those of this machine; if they are too few, the hosts take turns.
    """
    spanning = [trial for trial in trials if trial.nodes > 1]
    hosts = max((trial.nodes for trial in spanning), default=1)
    return LabSettings(
        hosts=hosts,
        cores=cores,
        bandwidth=bandwidth,
        turns=hosts > 1 and hosts * cores > here,
        slice_ms=slice_ms,
        spark=any(trial.launcher == "spark" for trial in spanning),
    )


def check_name(name: str) -> None:
    """Raise UsageError unless `name` can be part of host names and namespaces."""
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"name of a lab: expected a small letter, then up to 30 of a-z, 0-9 and -, got {name!r}"
        )


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

    @property
    def hub(self) -> str:
        """Return the name of the namespace of the switch."""
        return hub_of(self.name)

    @property
    def hostfile(self) -> Path:
        """Return the path of the host list for Open MPI, with slots."""
        return Path(self.folder, "hosts")

    @property
    def groups(self) -> list[str]:
        """Return the names of the hosts' control groups, if they take turns."""
        return [host.namespace for host in self.hosts] if self.settings.turns else []

    @property
    def guardian(self) -> Path:
        """Return the path of the file with the process id of the turns' guardian."""
        return Path(self.folder, "guardian")

    @property
    def slices(self) -> Path:
        """Return the path of the record of turns."""
        return Path(self.logs, "slices")

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


# The names of network namespaces in /run/netns hold for the whole machine; so do those of labs.
ROOT = Path("/run/paceline-lab")
_LOCK_S = 60.0


@dataclass(frozen=True, slots=True)
class Registry:
    """Files NAME.json. A process that makes or removes a lab holds the lock."""

    root: Path = ROOT

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Exclude other processes that make or remove labs. Raises TimedOut, EnvironmentLacks."""
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        owner = self.root.stat().st_uid
        if owner != os.geteuid():
            raise EnvironmentLacks(
                f"{self.root}: expected a folder of user {os.geteuid()}, it belongs to {owner}; "
                "find out which program made it, and remove it"
            )
        busy = f"another lab was being made or removed for {_LOCK_S:g} s"
        with exclusive_lock(self.root / "lock", _LOCK_S, busy):
            yield

    def file(self, name: str) -> Path:
        return self.root / f"{name}.json"

    def names(self) -> list[str]:
        return sorted(file.stem for file in self.root.glob("*.json"))

    def load(self, name: str) -> LabRecord | None:
        """Read the record of a lab; None if there is no such lab or its record is unreadable."""
        file = self.file(name)
        try:
            record = typed(read_json(file), LabRecord, file)
        except DataError:
            return None
        return record if record.schema == SCHEMA else None

    def save(self, record: LabRecord) -> None:
        write_json(self.file(record.name), dataclasses.asdict(record))

    def forget(self, name: str) -> None:
        self.file(name).unlink(missing_ok=True)
