"""A Prometheus that has imported a run, for as long as pictures are drawn."""

from __future__ import annotations

import json
import urllib.parse
import urllib.request
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any
from urllib.error import HTTPError

from paceline.errors import DataError, EnvironmentLacks
from paceline.monitor import prometheus
from paceline.monitor.backfill import import_blocks, write_openmetrics
from paceline.monitor.children import running
from paceline.records.files import write_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from paceline.records.layout import RunFiles

_LIMIT_S = 60.0  # for one answer


@dataclass(frozen=True, slots=True)
class Series:
    """Labels and, in order of time, moments and values; those that are no number are left out."""

    labels: Mapping[str, str]
    times_unix_s: tuple[float, ...]
    values: tuple[float, ...]


class Source:
    """Prometheus's HTTP API (https://prometheus.io/docs/prometheus/latest/querying/api/)."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def at(self, expr: str, unix_s: float) -> list[Series]:
        """Raises DataError for a query that Prometheus refuses, OSError where it does not
        answer."""
        return self._ask("query", query=expr, time=f"{unix_s:.3f}")

    def over(self, expr: str, start_unix_s: float, end_unix_s: float, step_s: int) -> list[Series]:
        """The same at every step from start to end."""
        start, end = f"{start_unix_s:.3f}", f"{end_unix_s:.3f}"
        return self._ask("query_range", query=expr, start=start, end=end, step=str(step_s))

    def runs(self) -> list[str]:
        """The values of the dashboards' variable `run`."""
        found: list[str] = self._data("label/run/values", **{"match[]": "paceline_run_info"})
        return found

    def _ask(self, path: str, **parameters: str) -> list[Series]:
        found: list[Mapping[str, Any]] = self._data(path, **parameters)["result"]
        return [series for series in map(_series, found) if series.values]

    def _data(self, path: str, **parameters: str) -> Any:
        address = f"{self._url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with self._opener.open(address, timeout=_LIMIT_S) as answer:
                return json.load(answer)["data"]
        except HTTPError as error:
            said = error.read().decode("utf-8", "replace")
            raise DataError(f"Prometheus refuses {parameters}: {said}") from error


def _series(result: Mapping[str, Any]) -> Series:
    pairs = result["values"] if "values" in result else [result["value"]]
    known = [(float(at), float(value)) for at, value in pairs if value != "NaN"]
    return Series(result["metric"], tuple(t for t, _ in known), tuple(v for _, v in known))


@contextmanager
def imported(run: RunFiles) -> Iterator[Source]:
    """Import `run` as `paceline monitor` does, into a folder of its own, which goes afterwards.

    Raises EnvironmentLacks where Prometheus is missing or ends by itself or nothing was imported,
    TimedOut.
    """
    programs = {n: prometheus.find_program(n, "Prometheus") for n in ("prometheus", "promtool")}
    with TemporaryDirectory(prefix="paceline-pictures-") as name:
        folder = Path(name) / "monitor"
        (folder / "data").mkdir(parents=True)
        text = folder / "backfill.om"
        if not write_openmetrics(run, text).samples:
            raise EnvironmentLacks(f"{run.root}: expected a run with traces; there are none")
        import_blocks(programs["promtool"], text, folder / "data")
        text.unlink()
        write_text(folder / "prometheus.yml", prometheus.configuration(prometheus.Access()))
        listen = prometheus.free_address(prometheus.Address("127.0.0.1", 0))
        argv = prometheus.command(programs["prometheus"], "prometheus.yml", "data", listen)
        with running("Prometheus", argv, folder, {}) as child:
            prometheus.wait_until_ready(listen, child.check)
            yield Source(listen.url)
