"""The settings of a lab."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from paceline.errors import EnvironmentLacks, UsageError
from paceline.spec.values import bits_per_s

NAME_VARIABLE = "PACELINE_LAB"  # set in all processes of a lab
MOST_HOSTS = 64
_NAME = re.compile(r"[a-z][a-z0-9-]{0,30}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LabSettings:
    """Settings of hosts that can reach each other, but nothing else.

    cores: exclusive cores of each host; None: all hosts share the cores of this machine.
    slots: ranks or Spark cores that a host offers; None: the number of its cores.
    bandwidth: maximum rate of each host in each direction, such as "1gbit" or "1 Gbit/s"; None:
    no limit.
    spark: start a standalone master on the first host and a worker on each host.
    """

    hosts: int = 2
    cores: int | None = None
    slots: int | None = None
    bandwidth: str | None = None
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

    def slots_per_host(self) -> int:
        """Return the slots of a host for the host list and the Spark workers."""
        return self.slots or self.cores or len(os.sched_getaffinity(0))

    def cores_of(self, number: int, here: list[int]) -> list[int]:
        """Select the cores of host `number` from `here`; [] if the hosts share all cores.

        Raises EnvironmentLacks if there are too few cores for all hosts.
        """
        if self.cores is None:
            return []
        if self.hosts * self.cores > len(here):
            raise EnvironmentLacks(
                f"a lab of {self.hosts} hosts with {self.cores} cores each needs "
                f"{self.hosts * self.cores}, this process may use {len(here)}; request fewer, or "
                "omit cores, so that all hosts share them"
            )
        return here[number * self.cores : (number + 1) * self.cores]


def check_name(name: str) -> None:
    """Raise UsageError unless `name` can be part of host names and namespaces."""
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"name of a lab: expected a small letter, then up to 30 of a-z, 0-9 and -, got {name!r}"
        )
