"""Asks a Prometheus what a dashboard would ask it."""

from __future__ import annotations

import json
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

LIMIT_S = 20.0


def fill_in(expr: str, *, run: str, range_s: int, step_s: int = 1) -> str:
    """A dashboard's query with its variables as Grafana sets them, all hosts and ranks chosen.

    $__rate_interval is the larger of step + scrape interval and four scrape intervals:
    https://grafana.com/docs/grafana/latest/datasources/prometheus/template-variables/
    """
    values = {
        "$__rate_interval": f"{max(step_s + 1, 4)}s",
        "$__interval": f"{step_s}s",
        "$__range": f"{range_s}s",
        "$run": run,
        "$host": ".*",
        "$rank": ".*",
    }
    for name, value in values.items():
        expr = expr.replace(name, value)
    assert "$" not in expr, expr
    return expr


class Prometheus:
    """The HTTP API (https://prometheus.io/docs/prometheus/latest/querying/api/)."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def is_ready(self) -> bool:
        """Return whether it answers; it may not listen yet, or still read its storage."""
        try:
            with self._opener.open(f"{self._url}/-/ready", timeout=LIMIT_S):
                return True
        except OSError:
            return False

    def instant(self, expr: str, unix_s: float) -> list[dict[str, Any]]:
        return self._result("query", query=expr, time=f"{unix_s:.3f}")

    def over(
        self, expr: str, start_unix_s: float, end_unix_s: float, step_s: float = 1.0
    ) -> list[dict[str, Any]]:
        return self._result(
            "query_range",
            query=expr,
            start=f"{start_unix_s:.3f}",
            end=f"{end_unix_s:.3f}",
            step=f"{step_s:g}",
        )

    def get(self, path: str, **parameters: str) -> Any:
        """The data of an answer; an error of Prometheus's becomes an AssertionError."""
        address = f"{self._url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with self._opener.open(address, timeout=LIMIT_S) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{parameters}: {error.read().decode()}") from error

    def _result(self, path: str, **parameters: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.get(path, **parameters)["result"]
        return found


def numbers(series: list[dict[str, Any]]) -> list[float]:
    """All values of an instant or a range answer that are numbers."""
    pairs = [pair for each in series for pair in each.get("values", [each.get("value")])]
    return [float(value) for _, value in pairs if value != "NaN"]
