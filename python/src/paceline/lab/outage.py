"""A host of a lab that loses its power, and comes back."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from paceline.errors import TimedOut
from paceline.host.processes import kill_until_gone
from paceline.lab import network, spark
from paceline.lab.registry import Registry
from paceline.lab.settings import NAME_VARIABLE

if TYPE_CHECKING:
    from paceline.lab.record import Host, LabRecord

_KILL_S = 10.0


def own_lab(registry: Registry | None = None) -> LabRecord | None:
    """Return the lab that this process is in; None outside of labs."""
    name = os.environ.get(NAME_VARIABLE)
    return None if name is None else (registry or Registry()).load(name)


def crash(record: LabRecord, host: Host) -> None:
    """Take the host's link down and kill all its processes.

    The link is first, so that nobody learns of the end of a process. Raises TimedOut.
    """
    network.cut(record, host)
    if not kill_until_gone(lambda: network.processes_in(host.namespace), _KILL_S):
        raise TimedOut(f"processes of host {host.name} are alive {_KILL_S:g} s after SIGKILL")


def boot(record: LabRecord, host: Host) -> None:
    """Bring the link up again, and start a Spark worker if the lab has Spark.

    Returns before the worker is registered.
    """
    network.restore(record, host)
    if record.settings.spark:
        spark.start_worker(record, host)
