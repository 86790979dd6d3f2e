"""What went through a host's disks and network interfaces, device by device.

Sources: kernel documentation, admin-guide/iostats (/proc/diskstats); proc_pid_net(5)
(/proc/net/dev).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.records.rows import DiskCounters, NetworkCounters
from paceline.telemetry.kernel_files import KernelFile

if TYPE_CHECKING:
    from pathlib import Path

_SECTOR_BYTES = 512  # in /proc/diskstats, whatever the disk has
_MILLISECONDS = 1000.0
# What is stacked on other disks, or lies in memory: it would count bytes twice.
_NOT_DISKS = ("loop", "ram", "zram", "dm-", "md", "sr", "fd")
# The host's ends of containers' links: their number has no bound, and their traffic passes a
# bridge or an address of the host as well.
_CONTAINER_LINKS = ("veth", "cali", "lxc")


class DiskReader:
    """Whole disks. Which ones there are is looked up when a name turns up for the first time."""

    def __init__(self, proc: Path, sys: Path) -> None:
        self._file = KernelFile(proc / "diskstats")
        self._blocks = sys / "block"
        self._is_disk: dict[bytes, bool] = {}

    def read(self) -> dict[str, DiskCounters]:
        """By name, as in /proc/diskstats; empty where the system lists none (some containers)."""
        disks = {}
        for line in self._file.read().splitlines():
            words = line.split(maxsplit=3)  # most lines are of no whole disk
            if len(words) < 4 or not self._counts(words[2]):
                continue
            counters = words[3].split()
            disks[words[2].decode()] = DiskCounters(
                read_bytes=int(counters[2]) * _SECTOR_BYTES,
                written_bytes=int(counters[6]) * _SECTOR_BYTES,
                busy_s=int(counters[9]) / _MILLISECONDS,
            )
        return disks

    def _counts(self, name: bytes) -> bool:
        known = self._is_disk.get(name)
        if known is None:
            known = self._is_disk[name] = self._is_whole_disk(name.decode())
        return known

    def _is_whole_disk(self, name: str) -> bool:
        if name.startswith(_NOT_DISKS):
            return False
        # Partitions are no folders of their own there; "!" stands for a slash (cciss/c0d0).
        return (self._blocks / name.replace("/", "!")).is_dir()


class NetworkReader:
    """Interfaces of the network namespace that the sampler is in."""

    def __init__(self, proc: Path) -> None:
        self._file = KernelFile(proc / "net" / "dev")

    def read(self) -> dict[str, NetworkCounters]:
        """By name, ends of containers' links included; empty where the system lists none."""
        networks = {}
        for line in self._file.read().splitlines()[2:]:  # below two lines of headings
            name, _, counters = line.rpartition(b":")
            fields = counters.split()
            if len(fields) < 16:
                continue
            networks[name.strip().decode()] = NetworkCounters(
                received_bytes=int(fields[0]),
                sent_bytes=int(fields[8]),
                dropped_packets=int(fields[3]) + int(fields[11]),
            )
        return networks


def without_container_links(networks: dict[str, NetworkCounters]) -> dict[str, NetworkCounters]:
    """Those whose number is bounded by the host's hardware and its set-up."""
    return {name: it for name, it in networks.items() if not name.startswith(_CONTAINER_LINKS)}
