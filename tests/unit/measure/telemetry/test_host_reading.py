"""A whole reading from a fabricated /proc, with exact values."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from paceline.measure.records.metrics.metric import Row, as_lists
from paceline.measure.telemetry.host_reading import HostReader

FILES = {
    "proc/stat": "cpu  100 2 50 800 40 1 1 10 20 0\ncpu0 60 2 30 400 10 1 1 0 20 0\n"
    "cpu1 40 0 20 400 30 0 0 10 0 0\nintr 1\nbtime 1\n",
    "proc/meminfo": "MemTotal: 10 kB\nMemFree: 3 kB\nMemAvailable: 4 kB\nBuffers: 0 kB\n"
    "Cached: 1 kB\nActive: 1 kB\nInactive: 1 kB\nShmem: 0 kB\nSlab: 0 kB\n"
    "SwapTotal: 8 kB\nSwapFree: 5 kB\n",
    "proc/vmstat": "pswpin 1\npswpout 2\npgfault 30\npgmajfault 10\n",
    "proc/pressure/io": "some avg10=0 avg60=0 avg300=0 total=5000000\n",
    "proc/diskstats": "8 0 sda 1 0 2 1 1 0 4 1 0 2000 2\n8 1 sda1 1 0 2 1 1 0 4 1 0 2000 2\n"
    "7 0 loop0 1 0 6 1 1 0 8 1 0 0 2\n",
    "proc/net/dev": "heading\nheading\n"
    "eth0: 10 1 0 3 0 0 0 0 20 1 0 4 0 0 0 0\nvethx: 1 1 0 0 0 0 0 0 2 1 0 0 0 0 0 0\n",
}


class Host:
    """A host of files, and the reader of it."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        for path, text in FILES.items():
            self.write(path, text)
        for disk in ("sda", "loop0"):
            (root / "sys/block" / disk).mkdir(parents=True)
        (root / "proc/7").mkdir()
        monkeypatch.setattr(psutil, "PROCFS_PATH", str(root / "proc"))
        monkeypatch.setattr("psutil._pslinux.CLOCK_TICKS", 100)
        monkeypatch.setattr(psutil, "getloadavg", lambda: (1.5, 1.0, 0.5))
        monkeypatch.setattr(psutil, "cpu_freq", lambda: SimpleNamespace(current=2500.0))
        monkeypatch.setattr(psutil, "sensors_temperatures", dict, raising=False)
        self.reader = HostReader(
            7,
            gpus=lambda: {"0": {"name": "A", "utilization_ratio": 0.05}},
            block_devices=root / "sys/block",
        )

    def write(self, path: str, text: str) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(text)

    def row(self) -> Row:
        return as_lists(self.reader.read(slow=True))


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    return Host(tmp_path, monkeypatch)


def test_row_has_exactly_what_the_kernel_counts(host: Host) -> None:
    assert host.row() == {
        "cpu_seconds": {
            "user": 0.8,  # without guests
            "system": 0.5,
            "idle": 8.0,
            "iowait": 0.4,
            "steal": 0.1,
            "nice": 0.02,
            "other": 0.22,  # irq, softirq, guests
        },
        "core_busy_s": [0.94, 0.6],
        "cpu_cores": 2,
        "cpu_frequency_hertz": 2.5e9,
        "load": {"1m": 1.5, "5m": 1.0, "15m": 0.5},
        "pressure": {"io": {"some_s": 5.0}},
        "ram_used_bytes": 6 * 1024,
        "ram_total_bytes": 10 * 1024,
        "swap_used_bytes": 3 * 1024,
        "swap_total_bytes": 8 * 1024,
        "swapped_in_bytes": 4096,
        "swapped_out_bytes": 8192,
        "minor_page_faults": 20,
        "major_page_faults": 10,
        "disks": {"sda": {"read_bytes": 1024, "written_bytes": 2048, "busy_s": 2.0}},
        "networks": {"eth0": {"sent_bytes": 20, "received_bytes": 10, "dropped_packets": 7}},
        "gpus": [{"name": "A", "utilization_ratio": 0.05}],
    }


def test_counter_that_the_kernel_decreases_stays(host: Host) -> None:
    host.row()
    host.write("proc/stat", FILES["proc/stat"].replace("800 40", "790 30"))
    assert host.row()["cpu_seconds"] == {
        "user": 0.8, "system": 0.5, "idle": 8.0, "iowait": 0.4, "steal": 0.1,
        "nice": 0.02, "other": 0.22,
    }  # fmt: skip


def test_missing_sources_are_left_out(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    (host.root / "proc/pressure/io").unlink()
    (host.root / "proc/diskstats").write_text("")
    monkeypatch.setattr(psutil, "cpu_freq", lambda: None)
    row = host.row()
    assert "pressure" not in row
    assert "disks" not in row
    assert "cpu_frequency_hertz" not in row


def test_driver_that_cannot_report_a_frequency_gives_none(host, monkeypatch) -> None:
    def fails() -> None:
        raise NotImplementedError

    monkeypatch.setattr(psutil, "cpu_freq", fails)
    assert "cpu_frequency_hertz" not in host.row()


def test_package_sensor_replaces_those_of_its_cores(host, monkeypatch) -> None:
    def sensor(label: str, celsius: float) -> SimpleNamespace:
        return SimpleNamespace(label=label, current=celsius)

    found = {
        "coretemp": [sensor("Package id 0", 60.0), sensor("Core 0", 59.0)],
        "nvme": [sensor("Composite", 40.0), sensor("Composite", 41.0)],
        "acpitz": [sensor("", 30.0)],
    }
    monkeypatch.setattr(psutil, "sensors_temperatures", lambda: found, raising=False)
    assert host.row()["temperatures_celsius"] == {
        "coretemp/Package id 0": 60.0,
        "nvme/Composite": 40.0,
        "nvme/Composite 2": 41.0,
        "acpitz": 30.0,
    }


def test_slow_values_are_read_only_when_they_are_due(host: Host) -> None:
    slow = {"cpu_frequency_hertz", "minor_page_faults", "major_page_faults", "gpus"}
    assert host.row().keys() - host.reader.read(slow=False).keys() == slow


def test_host_that_takes_turns_has_the_cpu_time_of_its_control_group(host, tmp_path) -> None:
    usage = tmp_path / "cpuacct.usage"
    usage.write_text("1500000000\n")
    row = HostReader(7, cpu_time=usage, gpus=dict, block_devices=tmp_path).read(slow=False)
    assert row["cpu_seconds"] == {"user": 1.5}
    assert row["cpu_cores"] == len(os.sched_getaffinity(0))
    assert not {"core_busy_s", "load", "pressure"} & set(row)
    usage.unlink()  # the guardian has ended
    row = HostReader(7, cpu_time=usage, gpus=dict, block_devices=tmp_path).read(slow=False)
    assert "cpu_seconds" not in row
