"""The Prometheus view of a sample: exact values, promtool's approval, one loopback listener."""

from __future__ import annotations

import shutil
import socket
import subprocess
import urllib.request
from collections.abc import Iterator
from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from paceline.records.rows import HostSample
from paceline.telemetry.exporter import LatestSampleCollector, MetricsServer
from paceline.telemetry.sampler import CpuSeconds

SAMPLE = HostSample(
    unix_s=1700000000.5,
    cpu_user_percent=50.0,
    cpu_system_percent=10.0,
    cpu_idle_percent=30.0,
    cpu_iowait_percent=5.0,
    cpu_steal_percent=3.0,
    cpu_other_percent=2.0,
    iowait_valid=True,
    ram_used_bytes=101,
    ram_total_bytes=102,
    swap_used_bytes=103,
    disk_read_bytes=104,
    disk_write_bytes=105,
    network_sent_bytes=106,
    network_received_bytes=107,
    run_processes=108,
    run_cpu_seconds=109.5,
    run_cpu_percent=110.0,
    run_rss_bytes=111,
    run_pss_bytes=112,
    run_threads=113,
    run_voluntary_context_switches=114,
    run_involuntary_context_switches=115,
    sidecar_cpu_seconds=0.5,
    sidecar_rss_bytes=116,
)
CPU = CpuSeconds(user=1.0, system=2.0, idle=3.0, iowait=4.0, steal=5.0, other=6.0)
# everything a scrape says of SAMPLE, beside paceline_run_info
EXPECTED = {
    "paceline_host_cpu_seconds_total{mode=user}": 1.0,
    "paceline_host_cpu_seconds_total{mode=system}": 2.0,
    "paceline_host_cpu_seconds_total{mode=idle}": 3.0,
    "paceline_host_cpu_seconds_total{mode=iowait}": 4.0,
    "paceline_host_cpu_seconds_total{mode=steal}": 5.0,
    "paceline_host_cpu_seconds_total{mode=other}": 6.0,
    "paceline_host_iowait_valid": 1.0,
    "paceline_host_cpu_cores": 2.0,
    "paceline_host_memory_used_bytes": 101.0,
    "paceline_host_memory_size_bytes": 102.0,
    "paceline_host_swap_used_bytes": 103.0,
    "paceline_host_disk_read_bytes_total": 104.0,
    "paceline_host_disk_written_bytes_total": 105.0,
    "paceline_host_network_transmit_bytes_total": 106.0,
    "paceline_host_network_receive_bytes_total": 107.0,
    "paceline_run_processes": 108.0,
    "paceline_run_cpu_seconds_total": 109.5,
    "paceline_run_resident_memory_bytes": 111.0,
    "paceline_run_proportional_memory_bytes": 112.0,
    "paceline_run_threads": 113.0,
    "paceline_run_context_switches_total{kind=voluntary}": 114.0,
    "paceline_run_context_switches_total{kind=involuntary}": 115.0,
    "paceline_sidecar_cpu_seconds_total": 0.5,
    "paceline_sidecar_resident_memory_bytes": 116.0,
    "paceline_sidecar_last_sample_timestamp_seconds": 1700000000.5,
}
INFO = {"trial": "simple-big mpi\n", "launcher": 'm"p\\i'}


@pytest.fixture
def collector() -> LatestSampleCollector:
    return LatestSampleCollector("node-1", 2, INFO)


@pytest.fixture
def server(collector: LatestSampleCollector) -> Iterator[MetricsServer]:
    server = MetricsServer(collector, "127.0.0.1", 0)
    yield server
    server.close()


def scrape(server: MetricsServer) -> str:
    url = f"http://127.0.0.1:{server.port}/metrics"
    with urllib.request.urlopen(url, timeout=5) as answer:
        content: bytes = answer.read()
    return content.decode()


def values(text: str) -> dict[str, float]:
    """Every series but paceline_run_info; all must carry the host."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == "paceline_run_info":
                continue
            labels = dict(sample.labels)
            assert labels.pop("host") == "node-1"
            shown = ",".join(f"{key}={value}" for key, value in labels.items())
            found[f"{sample.name}{{{shown}}}" if shown else sample.name] = sample.value
    return found


def test_scrape_tells_the_latest_sample_and_nothing_else(
    collector: LatestSampleCollector, server: MetricsServer
) -> None:
    collector.update(replace(SAMPLE, ram_used_bytes=1), CPU)
    collector.update(SAMPLE, CPU)
    assert values(scrape(server)) == EXPECTED


def test_run_facts_stand_in_one_info_series(
    collector: LatestSampleCollector, server: MetricsServer
) -> None:
    collector.update(SAMPLE, CPU)
    families = {family.name: family for family in text_string_to_metric_families(scrape(server))}
    (sample,) = families["paceline_run_info"].samples
    assert (sample.labels, sample.value) == ({"host": "node-1", **INFO}, 1.0)


def test_before_the_first_sample_only_the_run_is_told(server: MetricsServer) -> None:
    text = scrape(server)
    assert "paceline_run_info{" in text
    assert values(text) == {}


def test_missing_measurements_have_no_series(
    collector: LatestSampleCollector, server: MetricsServer
) -> None:
    missing = replace(SAMPLE, disk_read_bytes=None, network_sent_bytes=None, run_pss_bytes=None)
    collector.update(missing, CPU)
    gone = {
        "paceline_host_disk_read_bytes_total",
        "paceline_host_network_transmit_bytes_total",
        "paceline_run_proportional_memory_bytes",
    }
    assert values(scrape(server)) == {k: v for k, v in EXPECTED.items() if k not in gone}


def test_pss_stays_as_last_read(collector: LatestSampleCollector, server: MetricsServer) -> None:
    collector.update(SAMPLE, CPU)
    collector.update(replace(SAMPLE, run_pss_bytes=None), CPU)
    assert values(scrape(server)) == EXPECTED


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_finds_no_fault_with_names_and_help(
    collector: LatestSampleCollector, server: MetricsServer
) -> None:
    collector.update(SAMPLE, CPU)
    check = subprocess.run(
        ["promtool", "check", "metrics"],
        input=scrape(server),
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert (check.returncode, check.stdout, check.stderr) == (0, "", "")


def test_port_in_use_is_an_os_error(
    collector: LatestSampleCollector, server: MetricsServer
) -> None:
    with pytest.raises(OSError, match="in use"):
        MetricsServer(collector, "127.0.0.1", server.port)


def test_closed_server_frees_its_port(collector: LatestSampleCollector) -> None:
    server = MetricsServer(collector, "127.0.0.1", 0)
    server.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", server.port), timeout=5)


def test_ipv6_loopback_can_be_asked_for(collector: LatestSampleCollector) -> None:
    try:
        server = MetricsServer(collector, "::1", 0)
    except OSError as error:
        pytest.skip(f"no IPv6 loopback here: {error}")
    try:
        with urllib.request.urlopen(f"http://[::1]:{server.port}/metrics", timeout=5) as answer:
            assert answer.status == 200
    finally:
        server.close()
