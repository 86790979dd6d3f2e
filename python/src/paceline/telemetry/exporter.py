"""The latest tick as Prometheus metrics over HTTP. The only home of prometheus_client.

Names, units and labels are the catalogue's. The registry is one of its own, without the default
process collectors.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

import paceline
from paceline.telemetry.held import carried, is_costly
from paceline.telemetry.measures import host_tick_values, series
from paceline.telemetry.web import PLAIN, WebServer, WebSettings, guarded

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline.telemetry.ticks import HostTick

_CLOSE_LIMIT_S = 10.0


class LatestTick(Collector):
    """Renders the last tick handed to `update`; nothing is computed unless someone scrapes."""

    def __init__(self, host: str) -> None:
        self._host = host
        # The last tick that read what is costly, and the last of all.
        self._ticks: tuple[HostTick, HostTick] | None = None

    def update(self, tick: HostTick) -> None:
        """Take over a tick; one assignment, so a scrape sees all of it or all of the last.

        What is costly and was not read in this tick stays as last read.
        """
        costly = tick if self._ticks is None else self._ticks[0]
        if costly is not tick and is_costly(tick):
            costly = carried(costly, tick)
        self._ticks = (costly, tick)

    def collect(self) -> Iterator[Metric]:
        if self._ticks is None:
            return
        tick = carried(*self._ticks)
        families: dict[str, Metric] = {}
        for measure in host_tick_values(self._host, tick, paceline.__version__):
            about = measure.metric
            family = families.get(about.name)
            if family is None:
                family = families[about.name] = Metric(about.name, about.help, about.kind)
            for name, labels, value in series(measure):
                family.add_sample(name, labels, value)
        yield from families.values()


class MetricsServer:
    """Serves a collector at http://HOST:PORT/metrics, or https, from a daemon thread."""

    def __init__(
        self,
        source: Collector,
        listen_host: str,
        listen_port: int,
        web: WebSettings = PLAIN,
    ) -> None:
        """Bind to the address (port 0: any free one).

        Raises OSError if it cannot be had, UsageError if certificates or secrets are not as they
        must be.
        """
        tls, credentials = web.tls(), web.credentials()
        registry = CollectorRegistry(auto_describe=False)
        registry.register(source)
        application = guarded(make_wsgi_app(registry), credentials)
        self._server = WebServer(application, listen_host, listen_port, tls)
        self.port: int = self._server.server_port
        self.scheme = web.scheme
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="metrics", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop serving and free the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=_CLOSE_LIMIT_S)
