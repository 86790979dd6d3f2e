"""Disks and interfaces from files with exact numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.records.rows import DiskCounters, NetworkCounters
from paceline.telemetry.devices import DiskReader, NetworkReader, without_container_links

if TYPE_CHECKING:
    from pathlib import Path

DISKSTATS = """\
   8       0 sda 10 1 200 11 20 2 400 21 0 1500 32 0 0 0 0 1 2
   8       1 sda1 10 1 200 11 20 2 400 21 0 1500 32 0 0 0 0
 259       0 nvme0n1 1 0 8 1 1 0 16 1 0 20 2
 253       0 dm-0 10 1 200 11 20 2 400 21 0 1500 32
   7       0 loop0 1 0 2 1 0 0 0 0 0 1 1
 252       0 zram0 1 0 2 1 0 0 0 0 0 1 1
   9       0 md127 1 0 2 1 0 0 0 0 0 1 1
"""
# receive: bytes packets errs drop fifo frame compressed multicast; transmit: the like
NETWORKS = """\
Inter-|   Receive                        |  Transmit
 face |bytes packets errs drop fifo frame|bytes packets errs drop fifo
    lo:     500      5    0    0    0     0   0   0      500       5    0    0    0     0   0   0
  eth0:    1000     10    1    2    0     0   0   0     3000      30    0    4    0     0   0   0
vethab12:    70      7    0    0    0     0   0   0       90       9    0    0    0     0   0   0
eth0:1:       1      1    0    0    0     0   0   0        2       1    0    0    0     0   0   0
"""


def host(root: Path, *disks: str) -> DiskReader:
    (root / "proc").mkdir(exist_ok=True)
    (root / "proc" / "diskstats").write_text(DISKSTATS)
    for disk in (*disks, "dm-0", "loop0", "zram0", "md127"):
        (root / "sys" / "block" / disk).mkdir(parents=True, exist_ok=True)
    return DiskReader(root / "proc", root / "sys")


def test_whole_disks_count_and_what_lies_on_them_does_not(tmp_path: Path) -> None:
    assert host(tmp_path, "sda", "nvme0n1").read() == {
        "sda": DiskCounters(read_bytes=200 * 512, written_bytes=400 * 512, busy_s=1.5),
        "nvme0n1": DiskCounters(read_bytes=8 * 512, written_bytes=16 * 512, busy_s=0.02),
    }


def test_disk_that_is_plugged_in_turns_up(tmp_path: Path) -> None:
    reader = host(tmp_path, "sda", "sdb")
    assert "sdb" not in reader.read()
    line = "   8      16 sdb 1 0 2 1 1 0 4 1 0 20 2\n"
    (tmp_path / "proc" / "diskstats").write_text(DISKSTATS + line)
    assert reader.read()["sdb"] == DiskCounters(read_bytes=1024, written_bytes=2048, busy_s=0.02)


def test_disk_with_a_slash_in_its_name_is_found(tmp_path: Path) -> None:
    reader = host(tmp_path, "cciss!c0d0")
    (tmp_path / "proc" / "diskstats").write_text(
        " 104 0 cciss/c0d0 1 0 2 1 1 0 4 1 0 20 2\n 104 1 cciss/c0d0p1 1 0 2 1 1 0 4 1 0 20 2\n"
    )
    assert list(reader.read()) == ["cciss/c0d0"]


def test_system_that_lists_no_disks_has_none(tmp_path: Path) -> None:
    assert DiskReader(tmp_path, tmp_path).read() == {}


def test_interfaces_count_both_ways(tmp_path: Path) -> None:
    (tmp_path / "net").mkdir()
    (tmp_path / "net" / "dev").write_text(NETWORKS)
    networks = NetworkReader(tmp_path).read()
    assert networks["eth0"] == NetworkCounters(
        sent_bytes=3000, received_bytes=1000, dropped_packets=6
    )
    assert list(networks) == ["lo", "eth0", "vethab12", "eth0:1"]
    assert list(without_container_links(networks)) == ["lo", "eth0", "eth0:1"]


def test_system_that_lists_no_interfaces_has_none(tmp_path: Path) -> None:
    assert NetworkReader(tmp_path).read() == {}
