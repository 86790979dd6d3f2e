"""Metrics endpoint: the values of the last reading, by prometheus_client. Only this module imports
prometheus_client."""

from __future__ import annotations

import socket
import ssl
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest, start_http_server
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.metrics_core import Metric as Family

from paceline.base.errors import UsageError
from paceline.measure.records.metrics import HOST, RANK, RUN_PROCESSES, TRAINING, Metric
from paceline.measure.records.metrics.metric import Row, values_in
from paceline.measure.telemetry.request import expected_authorization, guarded
from paceline.plan.spec.models import TelemetrySettings

_FAMILIES: Mapping[str, Callable[..., Family]] = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "info": InfoMetricFamily,
    "histogram": HistogramMetricFamily,
}
_CLIENT_LIMIT_S = 10.0  # for a whole request
_MOST_CLIENTS = 16  # at once; each is an open file, of which the trace needs some, too
_CLOSE_LIMIT_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """Values of all metrics at one moment, by column."""

    host: str
    run: str
    row: Row  # of the host, the run and the sidecar
    ranks: Mapping[int, Row] = field(default_factory=dict)
    training: Mapping[int, Row] = field(default_factory=dict)  # by rank


class LatestSnapshot:
    """Collector of prometheus_client over the last snapshot.

    Values that are read less often than at every tick show their last reading, as all gauges of
    Prometheus do.
    """

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = tuple(metrics)
        self.snapshot: Snapshot | None = None  # with the last value of each column

    def update(self, snapshot: Snapshot) -> None:
        """Replace the snapshot; columns without a value keep their last one."""
        before = self.snapshot
        if before is not None:
            ranks = {
                rank: _newest(row, snapshot.ranks.get(rank)) for rank, row in before.ranks.items()
            }
            snapshot = replace(
                snapshot,
                row=_newest(before.row, snapshot.row),
                ranks={**snapshot.ranks, **ranks},
            )
        self.snapshot = snapshot

    def collect(self) -> Iterator[Family]:
        """Yield all series; none before the first snapshot."""
        if self.snapshot is not None:
            yield from families(self._metrics, self.snapshot)


def families(metrics: Iterable[Metric], snapshot: Snapshot) -> Iterator[Family]:
    """Yield the series of a snapshot as metric families of prometheus_client."""
    rows = {RANK: snapshot.ranks, TRAINING: snapshot.training}
    labels = {"host": snapshot.host, "run": snapshot.run}
    for metric in metrics:
        family = _FAMILIES[metric.kind](
            metric.full_name, metric.help, labels=(*metric.scope.labels, *metric.labels)
        )
        if metric.scope in rows:
            for rank, row in sorted(rows[metric.scope].items()):
                _add(family, metric, {**labels, "rank": str(rank)}, row)
        else:
            of_host = {"host": snapshot.host} if metric.scope is HOST else labels
            _add(family, metric, of_host, snapshot.row)
        if family.samples:
            yield family


def with_gauges_of(alive: Snapshot, last: Snapshot, metrics: Iterable[Metric]) -> Snapshot:
    """Return `last` with memory, threads and open files as of `alive`, when processes were alive.

    At the end of a run all processes are gone, and these gauges are 0.
    """
    gauges = {
        metric.path[0]
        for metric in metrics
        if metric.scope in (RUN_PROCESSES, RANK)
        and metric.kind == "gauge"
        and not metric.name.endswith("_processes")
    }

    def merged(before: Row, now: Row) -> Row:
        return {**now, **{name: before[name] for name in gauges & before.keys()}}

    ranks = {rank: merged(alive.ranks.get(rank, {}), row) for rank, row in last.ranks.items()}
    return replace(last, row=merged(alive.row, last.row), ranks=ranks)


def text_of(metrics: Iterable[Metric], snapshot: Snapshot) -> str:
    """Return the series of a snapshot in Prometheus's text format."""
    registry = CollectorRegistry(auto_describe=False)
    latest = LatestSnapshot(metrics)
    latest.update(snapshot)
    registry.register(latest)
    return generate_latest(registry).decode()


class MetricsServer:
    """Serves the metrics at http(s)://HOST:PORT/metrics, from a daemon thread."""

    def __init__(
        self, source: LatestSnapshot, settings: TelemetrySettings, ports: Iterable[int]
    ) -> None:
        """Listen on the first of `ports` that is free (0: any free port).

        Raises OSError if none is free, UsageError if certificates or secrets are not usable.
        """
        authorization = expected_authorization(settings)
        _check_certificates(settings)
        # The registry is empty until authentication is in place.
        registry = CollectorRegistry(auto_describe=False)
        self._server, self._thread = _start(settings, registry, tuple(ports))
        if authorization is not None:
            self._server.set_app(guarded(self._server.get_app(), *authorization))
        registry.register(source)
        self.port: int = self._server.server_port
        self.scheme = "http" if settings.tls_certificate is None else "https"

    def close(self) -> None:
        """Stop serving and free the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=_CLOSE_LIMIT_S)


def _check_certificates(settings: TelemetrySettings) -> None:
    """Raise UsageError for unusable files, for which start_http_server would not close a socket."""
    if settings.tls_certificate is None:
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(settings.tls_certificate, settings.tls_key)
        if settings.tls_client_ca is not None:
            context.load_verify_locations(settings.tls_client_ca)
    except OSError as error:
        raise UsageError(
            "telemetry: expected PEM files in tls_certificate, tls_key (without a password) and "
            f"tls_client_ca: {error}"
        ) from error


def _start(settings: TelemetrySettings, registry: CollectorRegistry, ports: tuple[int, ...]) -> Any:
    for port in ports:
        try:
            server, thread = start_http_server(
                port,
                settings.listen_host,
                registry,
                certfile=settings.tls_certificate,
                keyfile=settings.tls_key,
                client_cafile=settings.tls_client_ca,
                client_auth_required=settings.tls_client_ca is not None,
            )
        except (OSError, OverflowError) as error:
            if port == ports[-1]:
                raise OSError(f"{settings.listen_host}:{port}: {error}") from error
            continue
        _Clients(server)
        handler: Any = server.RequestHandlerClass
        server.RequestHandlerClass = type("Handler", (handler,), {"timeout": _CLIENT_LIMIT_S})
        if settings.tls_certificate is not None:
            # The handshake then happens in the thread of the client, not in that of all clients.
            server.socket.do_handshake_on_connect = False  # type: ignore[attr-defined]
        return server, thread
    raise OSError("no port to listen on")


class _Clients:
    """The connections to a server: a few at a time, each for a limited time.

    Without it, clients that send a byte now and then would take all files that the process may
    open. The server's own limit is that of one read.
    """

    def __init__(self, server: Any) -> None:
        """Take the place of the server's own methods."""
        self._opened_s: dict[socket.socket, float] = {}
        self._shut_down, self._report = server.shutdown_request, server.handle_error
        server.verify_request = self._admit
        server.shutdown_request = self._close
        server.service_actions = self._end_late
        server.handle_error = self._failed

    def _admit(self, client: socket.socket, _address: object) -> bool:
        if len(self._opened_s) >= _MOST_CLIENTS:
            return False
        self._opened_s[client] = time.monotonic()
        return True

    def _close(self, client: socket.socket) -> None:
        self._opened_s.pop(client, None)
        self._shut_down(client)

    def _end_late(self) -> None:
        """End the connections whose time is over; their threads then close them."""
        now_s = time.monotonic()
        for client, opened_s in list(self._opened_s.items()):
            if now_s - opened_s > _CLIENT_LIMIT_S:
                with suppress(OSError):  # it has ended
                    socket.socket.shutdown(client, socket.SHUT_RDWR)  # below TLS

    def _failed(self, client: socket.socket, address: object) -> None:
        if not isinstance(sys.exception(), OSError):  # a client that was too slow, or left
            self._report(client, address)


def _add(family: Any, metric: Metric, scope_labels: dict[str, str], row: Row) -> None:
    for own_labels, value in values_in(row, metric):
        labels = [*scope_labels.values(), *own_labels.values()]
        if metric.kind == "info":
            facts = value if isinstance(value, Mapping) else {metric.info_labels[0]: value}
            family.add_metric(labels, facts)
        elif metric.kind == "histogram":
            bounds = [*map(repr, value.bounds), "+Inf"]
            buckets = list(zip(bounds, accumulate(value.counts), strict=True))
            family.add_metric(labels, buckets, value.total)
        else:
            family.add_metric(labels, value)


def _newest(before: Row, now: Row | None) -> Row:
    """Return `now` with the values of `before` where `now` has none."""
    merged = dict(before)
    for name, value in (now or {}).items():
        if isinstance(value, dict) and isinstance(merged.get(name), dict):
            merged[name] = {**merged[name], **value}
        elif value is not None:
            merged[name] = value
    return merged
