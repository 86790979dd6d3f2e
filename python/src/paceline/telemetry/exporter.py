"""The latest tick as Prometheus metrics over HTTP. The only home of prometheus_client.

Names, units and labels are the catalogue's. What scrapers ask for is written by Exposition; what is
rare (OpenMetrics alone, a choice of names, other methods) is left to prometheus_client, on a
registry of its own, without the default process collectors.
"""

from __future__ import annotations

import gzip
import threading
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

import paceline
from paceline.telemetry.catalogue import CATALOGUE
from paceline.telemetry.exposition import CONTENT_TYPE, Exposition
from paceline.telemetry.held import carried, is_costly
from paceline.telemetry.measures import host_tick_values, series
from paceline.telemetry.web import PLAIN, WebServer, WebSettings, guarded

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

    from paceline.telemetry.measures import Measure
    from paceline.telemetry.ticks import HostTick

_CLOSE_LIMIT_S = 10.0
# Lines repeat each other so much that the least effort does: of 195 kB 12 kB stay in place of 10,
# in 0.2 ms in place of 5 (measured on an AMD EPYC).
_GZIP_LEVEL = 1


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

    def measures(self) -> Iterator[Measure]:
        """All of the last tick; none before the first."""
        if self._ticks is not None:
            yield from host_tick_values(self._host, carried(*self._ticks), paceline.__version__)

    def describe(self) -> Iterator[Metric]:
        """All that may be told, so that a scrape can choose among them."""
        for about in CATALOGUE.values():
            yield Metric(about.name, about.help, about.kind)

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for measure in self.measures():
            about = measure.metric
            family = families.get(about.name)
            if family is None:
                family = families[about.name] = Metric(about.name, about.help, about.kind)
            for name, labels, value in series(measure):
                family.add_sample(name, labels, value)
        yield from families.values()


class _Scrapes:
    """Answers those who scrape, and hands the rest on."""

    def __init__(self, source: LatestTick, rest: WSGIApplication) -> None:
        self._source = source
        self._rest = rest
        self._lock = threading.Lock()
        self._exposition = Exposition()

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        if (
            environ["REQUEST_METHOD"] != "GET"
            or environ.get("QUERY_STRING")
            or not _takes_text(environ.get("HTTP_ACCEPT", ""))
        ):
            return self._rest(environ, start_response)
        with self._lock:  # one writing at a time has the names of the last
            body = self._exposition.text_of(self._source.measures()).encode()
        headers = [("Content-Type", CONTENT_TYPE)]
        if "gzip" in environ.get("HTTP_ACCEPT_ENCODING", ""):
            body = gzip.compress(body, _GZIP_LEVEL)
            headers.append(("Content-Encoding", "gzip"))
        start_response("200 OK", headers)
        return [body]


def _takes_text(accept: str) -> bool:
    """As Prometheus does: it would rather have OpenMetrics, which tells no more of ours."""
    kinds = {part.partition(";")[0].strip() for part in accept.split(",")}
    return not kinds.isdisjoint({"", "*/*", "text/*", "text/plain"})


class MetricsServer:
    """Serves the latest tick at http://HOST:PORT/metrics, or https, from a daemon thread."""

    def __init__(
        self,
        source: LatestTick,
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
        application = guarded(_Scrapes(source, make_wsgi_app(registry)), credentials)
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
