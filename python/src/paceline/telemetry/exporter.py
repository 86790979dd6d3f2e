"""The latest sample as Prometheus metrics over HTTP. The only home of prometheus_client.

Names, units and label bounds follow https://prometheus.io/docs/practices/naming/: what concerns
the run (trial, workload, launcher, ...) stands once, in `paceline_run_info`; every other series has
only `host` and at most one label with a fixed set of values. The collector has a registry of its
own, without the default process collectors.
"""

from __future__ import annotations

import socket
import socketserver
import threading
from typing import TYPE_CHECKING
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from prometheus_client.metrics_core import Metric

    from paceline.records.rows import HostSample
    from paceline.telemetry.sampler import CpuSeconds

_REQUEST_TIMEOUT_S = 10


class LatestSampleCollector(Collector):
    """Renders the last sample handed to `update`; nothing is computed unless someone scrapes."""

    def __init__(self, host: str, cores: int, info: Mapping[str, str]) -> None:
        self._host = host
        self._cores = cores
        self._info = dict(info)
        self._latest: tuple[HostSample, CpuSeconds, int | None] | None = None

    def update(self, sample: HostSample, cpu_seconds: CpuSeconds) -> None:
        """Take over a sample; one assignment, so a scrape sees all of it or all of the last."""
        pss_bytes = sample.run_pss_bytes
        if pss_bytes is None and self._latest is not None:
            pss_bytes = self._latest[2]  # read on few ticks only
        self._latest = (sample, cpu_seconds, pss_bytes)

    def collect(self) -> Iterator[Metric]:
        yield self._run_info()
        if self._latest is None:
            return
        sample, cpu_seconds, pss_bytes = self._latest
        yield from self._host_metrics(sample, cpu_seconds)
        yield from self._run_metrics(sample, pss_bytes)
        yield from self._sidecar_metrics(sample)

    def _run_info(self) -> Metric:
        labels = {"host": self._host, **self._info}
        metric = GaugeMetricFamily(
            "paceline_run_info", "What is being run; always 1.", labels=list(labels)
        )
        metric.add_metric(list(labels.values()), 1)
        return metric

    def _host_metrics(self, sample: HostSample, cpu_seconds: CpuSeconds) -> Iterator[Metric]:
        cpu = CounterMetricFamily(
            "paceline_host_cpu_seconds",
            "CPU time of the host since boot, all cores, by mode "
            "(other: nice, irq, softirq, guest). iowait is the kernel's, see proc(5).",
            labels=["host", "mode"],
        )
        for mode, seconds in cpu_seconds._asdict().items():
            cpu.add_metric([self._host, mode], seconds)
        yield cpu
        yield from self._gauge(
            "paceline_host_iowait_valid",
            "0 where the host's iowait counter ran backwards in the last sample or means nothing.",
            int(sample.iowait_valid),
        )
        yield from self._gauge("paceline_host_cpu_cores", "Logical CPUs of the host.", self._cores)
        yield from self._gauge(
            "paceline_host_memory_used_bytes",
            "Memory of the host that cannot be had without swapping.",
            sample.ram_used_bytes,
        )
        yield from self._gauge(
            "paceline_host_memory_size_bytes", "Memory of the host.", sample.ram_total_bytes
        )
        yield from self._gauge(
            "paceline_host_swap_used_bytes", "Swap space in use.", sample.swap_used_bytes
        )
        for name, text, value in (
            ("disk_read", "Read from all disks since boot.", sample.disk_read_bytes),
            ("disk_written", "Written to all disks since boot.", sample.disk_write_bytes),
            (
                "network_transmit",
                "Sent since boot, all interfaces, loopback included.",
                sample.network_sent_bytes,
            ),
            (
                "network_receive",
                "Received since boot, all interfaces, loopback included.",
                sample.network_received_bytes,
            ),
        ):
            yield from self._counter(f"paceline_host_{name}_bytes", text, value)

    def _run_metrics(self, sample: HostSample, pss_bytes: int | None) -> Iterator[Metric]:
        yield from self._gauge(
            "paceline_run_processes", "Live processes of the run.", sample.run_processes
        )
        yield from self._gauge("paceline_run_threads", "Their threads.", sample.run_threads)
        yield from self._counter(
            "paceline_run_cpu_seconds",
            "CPU time of the run's processes since the sidecar started, ended ones included.",
            sample.run_cpu_seconds,
        )
        yield from self._gauge(
            "paceline_run_resident_memory_bytes",
            "Resident memory, summed; pages that processes share count once for each.",
            sample.run_rss_bytes,
        )
        yield from self._gauge(
            "paceline_run_proportional_memory_bytes",
            "Proportional set size, summed, when last read; shared pages count once.",
            pss_bytes,
        )
        switches = CounterMetricFamily(
            "paceline_run_context_switches",
            "Context switches of the run's threads since the sidecar started, when last read.",
            labels=["host", "kind"],
        )
        switches.add_metric([self._host, "voluntary"], sample.run_voluntary_context_switches)
        switches.add_metric([self._host, "involuntary"], sample.run_involuntary_context_switches)
        yield switches

    def _sidecar_metrics(self, sample: HostSample) -> Iterator[Metric]:
        yield from self._counter(
            "paceline_sidecar_cpu_seconds",
            "CPU time that the sidecar itself has used.",
            sample.sidecar_cpu_seconds,
        )
        yield from self._gauge(
            "paceline_sidecar_resident_memory_bytes",
            "Resident memory of the sidecar itself.",
            sample.sidecar_rss_bytes,
        )
        yield from self._gauge(
            "paceline_sidecar_last_sample_timestamp_seconds",
            "When the host was last sampled.",
            sample.unix_s,
        )

    def _gauge(self, name: str, text: str, value: float | None) -> Iterator[Metric]:
        """One gauge, or no series at all where nothing was measured."""
        if value is not None:
            metric = GaugeMetricFamily(name, text, labels=["host"])
            metric.add_metric([self._host], value)
            yield metric

    def _counter(self, name: str, text: str, value: float | None) -> Iterator[Metric]:
        if value is not None:
            metric = CounterMetricFamily(name, text, labels=["host"])
            metric.add_metric([self._host], value)
            yield metric


class MetricsServer:
    """Serves a collector at http://HOST:PORT/metrics from a daemon thread."""

    def __init__(self, collector: Collector, listen_host: str, listen_port: int) -> None:
        """Bind to the address (port 0: any free one). Raises OSError if it cannot be had."""
        registry = CollectorRegistry()
        registry.register(collector)
        address = socket.getaddrinfo(listen_host, listen_port, type=socket.SOCK_STREAM)[0]
        server_class = _ServerV6 if address[0] == socket.AF_INET6 else _Server
        self._server = server_class((listen_host, listen_port), _Handler)
        self._server.set_app(make_wsgi_app(registry))
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="metrics", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop serving and free the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=_REQUEST_TIMEOUT_S)


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    daemon_threads = True
    block_on_close = False

    def server_bind(self) -> None:
        # Not HTTPServer's: it asks the name service for the host's full name, which may hang.
        socketserver.TCPServer.server_bind(self)
        self.server_name = str(self.server_address[0])
        self.server_port = self.server_address[1]
        self.setup_environ()


class _ServerV6(_Server):
    address_family = socket.AF_INET6


class _Handler(WSGIRequestHandler):
    timeout = _REQUEST_TIMEOUT_S  # a client that connects and says nothing

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """No line a scrape in the sidecar's log."""
