"""A whole reading from a fabricated /proc, and of this very host against psutil's view of it."""

from __future__ import annotations

import shutil
from dataclasses import fields
from typing import TYPE_CHECKING

import psutil
import pytest

from paceline.records.rows import (
    DiskCounters,
    GpuSample,
    HostSample,
    NetworkCounters,
    Pressure,
)
from paceline.telemetry.host import HostReader, HostReading
from paceline.telemetry.seldom import Clocks

if TYPE_CHECKING:
    from pathlib import Path

FILES = {
    "proc/stat": "cpu  100 0 50 800 40 0 0 10\ncpu0 60 0 30 400 10 0 0 0\n"
    "cpu1 40 0 20 400 30 0 0 10\nintr 1\n",
    "proc/meminfo": "MemTotal: 10 kB\nMemAvailable: 4 kB\nSwapTotal: 8 kB\nSwapFree: 5 kB\n",
    "proc/vmstat": "pswpin 1\npswpout 2\npgfault 30\npgmajfault 10\n",
    "proc/loadavg": "1.50 1.00 0.50 2/100 12345\n",
    "proc/pressure/io": "some avg10=0 avg60=0 avg300=0 total=5000000\n",
    "proc/diskstats": "8 0 sda 1 0 2 1 1 0 4 1 0 2000 2\n8 16 sdb 1 0 6 1 1 0 8 1 0 0 2\n",
    "proc/net/dev": "heading\nheading\n"
    "eth0: 10 1 0 0 0 0 0 0 20 1 0 0 0 0 0 0\nvethx: 1 1 0 0 0 0 0 0 2 1 0 0 0 0 0 0\n",
}


class Host:
    """A host of files, and a clock that goes on a second at each reading."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.now_s = 0.0
        self.temperatures_read = 0
        for path, text in FILES.items():
            self.write(path, text)
        for disk in ("sda", "sdb"):
            (root / "sys/block" / disk).mkdir(parents=True)
        self.reader = HostReader(
            7,
            proc=root / "proc",
            sys=root / "sys",
            clocks=Clocks(monotonic_s=lambda: self.now_s, cpu_s=lambda: 0.0),
            gpus=lambda: [GpuSample(name="A", utilization_percent=5.0)],
            temperatures=self._temperatures,
            frequency=lambda: 2.5e9,
        )

    def write(self, path: str, text: str) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(text)

    def _temperatures(self) -> dict[str, float]:
        self.temperatures_read += 1
        return {"chip": 40.0 + self.temperatures_read}


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def test_reading_has_exactly_the_fields_of_a_sample_that_are_about_the_host() -> None:
    about_the_run = {field.name for field in fields(HostSample)} - {
        field.name for field in fields(HostReading)
    }
    assert all(name == "unix_s" or name.startswith(("run_", "sidecar_")) for name in about_the_run)
    assert {field.name for field in fields(HostReading)} < {f.name for f in fields(HostSample)}


def test_fields_of_a_reading_make_a_sample(host: Host) -> None:
    reading = host.reader.read()
    run = {
        field.name: 0
        for field in fields(HostSample)
        if field.name == "unix_s" or field.name.startswith(("run_", "sidecar_"))
    }
    sample = HostSample(**reading.fields(), **run)
    assert sample.disks is reading.disks
    assert sample.load == [1.5, 1.0, 0.5]


def test_everything_is_read(host: Host) -> None:
    reading = host.reader.read()
    assert reading.cpu_seconds == {
        "user": 1.0,
        "system": 0.5,
        "idle": 8.0,
        "iowait": 0.4,
        "steal": 0.1,
        "other": 0.0,
    }
    assert reading.core_busy_s == [0.9, 0.6]
    assert (reading.ram_used_bytes, reading.ram_total_bytes) == (6 * 1024, 10 * 1024)
    assert (reading.swap_used_bytes, reading.swap_total_bytes) == (3 * 1024, 8 * 1024)
    assert (reading.minor_page_faults, reading.major_page_faults) == (20, 10)
    assert reading.swapped_out_bytes == 2 * reading.swapped_in_bytes
    assert reading.load == [1.5, 1.0, 0.5]
    assert reading.pressure == {"io": Pressure(some_s=5.0)}
    assert reading.disks == {
        "sda": DiskCounters(read_bytes=1024, written_bytes=2048, busy_s=2.0),
        "sdb": DiskCounters(read_bytes=3072, written_bytes=4096, busy_s=0.0),
    }
    assert (reading.disk_read_bytes, reading.disk_write_bytes) == (4096, 6144)
    assert reading.networks == {"eth0": NetworkCounters(sent_bytes=20, received_bytes=10)}
    # all interfaces, as ever
    assert (reading.network_sent_bytes, reading.network_received_bytes) == (22, 11)
    assert reading.cgroup is None
    assert reading.temperatures_celsius == {"chip": 41.0}
    assert reading.cpu_frequency_hertz == 2.5e9
    assert reading.gpus == [GpuSample(name="A", utilization_percent=5.0)]


def test_shares_come_with_the_second_reading(host: Host) -> None:
    first = host.reader.read()
    assert (first.cpu_user_percent, first.cpu_idle_percent) == (None, None)
    assert first.core_busy_percent == []
    host.write(
        "proc/stat",
        "cpu  200 0 100 820 60 0 0 20\ncpu0 150 0 40 400 10 0 0 0\n"
        "cpu1 50 0 60 420 50 0 0 20\nintr 1\n",
    )
    second = host.reader.read()
    assert second.cpu_user_percent == 50.0
    assert second.cpu_system_percent == 25.0
    assert second.cpu_idle_percent == 10.0
    assert second.cpu_iowait_percent == 10.0
    assert second.cpu_steal_percent == 5.0
    assert second.cpu_other_percent == 0.0
    assert second.core_busy_percent == [100.0, 50.0]
    assert second.iowait_valid


def test_iowait_that_means_nothing_is_missing_and_marked(host: Host) -> None:
    host.write("proc/stat", "cpu  100 0 50 800\n")
    host.reader.read()
    host.write("proc/stat", "cpu  150 0 50 850\n")
    reading = host.reader.read()
    assert reading.iowait_valid is False
    assert reading.cpu_iowait_percent is None
    assert reading.cpu_user_percent == 50.0


def test_iowait_that_ran_backwards_is_marked(host: Host) -> None:
    host.reader.read()
    host.write("proc/stat", "cpu  150 0 50 850 30 0 0 10\n")
    reading = host.reader.read()
    assert reading.iowait_valid is False
    assert reading.cpu_iowait_percent == 0.0
    assert reading.cpu_seconds["iowait"] == 0.4


def test_what_changes_slowly_is_read_once_a_second_or_when_asked_for(host: Host) -> None:
    told = []
    for now_s, deep in ((0.0, False), (0.5, False), (1.0, False), (1.1, True)):
        host.now_s = now_s
        told.append(host.reader.read(deep).temperatures_celsius["chip"])
    assert told == [41.0, 41.0, 42.0, 43.0]


def test_host_that_lists_no_devices_has_missing_values(host: Host) -> None:
    (host.root / "proc/diskstats").unlink()
    shutil.rmtree(host.root / "proc/net")
    reading = host.reader.read()
    assert (reading.disk_read_bytes, reading.disk_write_bytes) == (None, None)
    assert (reading.network_sent_bytes, reading.network_received_bytes) == (None, None)
    assert (reading.disks, reading.networks) == ({}, {})


@pytest.mark.parametrize("file", ["stat", "meminfo"])
def test_reading_fails_where_the_kernel_hides_what_every_sample_has(host: Host, file: str) -> None:
    (host.root / "proc" / file).unlink()
    with pytest.raises(OSError, match=file):
        host.reader.read()


def test_this_host_is_as_psutil_sees_it() -> None:
    before = _psutil_cpu_seconds()
    reading = HostReader().read(deep=True)
    after = _psutil_cpu_seconds()
    assert before - 0.1 <= sum(reading.cpu_seconds.values()) <= after + 0.1
    assert len(reading.core_busy_s) == psutil.cpu_count()
    memory = psutil.virtual_memory()
    assert reading.ram_total_bytes == memory.total
    assert 0 < reading.ram_used_bytes < memory.total
    assert reading.swap_total_bytes == psutil.swap_memory().total
    interfaces = {name: it.bytes_sent for name, it in psutil.net_io_counters(pernic=True).items()}
    assert reading.networks.keys() <= interfaces.keys()
    assert all(it.sent_bytes <= interfaces[name] for name, it in reading.networks.items())
    disks = psutil.disk_io_counters(perdisk=True) or {}
    assert reading.disks.keys() <= disks.keys()
    assert all(disk.read_bytes <= disks[name].read_bytes for name, disk in reading.disks.items())
    assert len(reading.load) == 3


def _psutil_cpu_seconds() -> float:
    times = psutil.cpu_times()
    return sum(times) - times.guest - times.guest_nice  # which are in user and nice already
