"""A host of a lab that loses its power, and comes back."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

from paceline.errors import TimedOut
from paceline.host.processes import kill_until_gone, send
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
        spark.start_worker(record, host)
