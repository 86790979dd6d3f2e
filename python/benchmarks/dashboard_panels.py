"""Answers of a Prometheus to the queries of the dashboards, for the pictures of their panels.

    python dashboard_panels.py RUN_DIR --out results/raw/dashboard_panels.json [--listen HOST:PORT]

`paceline monitor` imports the run into a Prometheus, which must be on PATH. The queries are those
of the panels that `plots/pages.py` draws, in the files of monitoring/grafana. Curves have the time
of the whole run, values of bars are those at its end.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from common import documented_parser, write_results
from paceline.base.host.processes import end_processes, guarded
from paceline.measure.records.files import read_json
from paceline.measure.records.layout import RunFiles

FOLDER = Path(__file__).parents[2] / "monitoring" / "grafana" / "dashboards"
# By dashboard, as they stand in the pictures.
PANELS = {
    "compare": (
        "Speedup on one node and on several", "CPU idle by local strategy",
        "IOWait by local strategy", "RAM by local strategy", "Threads by local strategy",
        "Idle, IOWait and waiting for gradients by launcher",
    ),
    "run": (
        "CPU idle and IOWait", "Cores that the run uses", "Phases", "Step time", "RAM",
        "Threads and processes",
    ),
    "cluster": ("Idle", "IOWait", "Threads"),
}  # fmt: skip
_CURVE_POINTS = 240
_READY_S = 120.0


def main() -> None:
    options = arguments()
    run = RunFiles(options.run.resolve())
    began, ended = _time_of(run)
    variables = dict.fromkeys(("$run", "$host", "$rank"), ".*")
    with _prometheus(run.root, options.listen) as url:
        found = {
            name: [_answered(url, panel, began, ended, variables) for panel in _panels(name)]
            for name in PANELS
        }
    spec = read_json(run.manifest)["spec_toml"]
    results = {"seconds": round(ended - began, 1), "spec": spec, "dashboards": found}
    write_results(options.out, "dashboard_panels", results)


def arguments() -> argparse.Namespace:
    parser = documented_parser(__doc__)
    parser.add_argument("run", type=Path, help="directory of a finished run")
    parser.add_argument("--listen", default="127.0.0.1:9090", help="free address for Prometheus")
    parser.add_argument("--out", type=Path, required=True, help="JSON file for all raw values")
    return parser.parse_args()


def _time_of(run: RunFiles) -> tuple[float, float]:
    """Return when the first trial was launched, and when the last one ended."""
    outcomes = [read_json(files.outcome) for _, files in run.trials()]
    return (
        min(outcome["launched_unix_s"] for outcome in outcomes),
        max(outcome["ended_unix_s"] for outcome in outcomes),
    )


def _panels(dashboard: str) -> list[dict[str, Any]]:
    """Return the panels to draw, in the order of PANELS."""
    document = json.loads((FOLDER / f"{dashboard}.json").read_text("utf-8"))
    every = [each for panel in document["panels"] for each in (panel, *panel.get("panels", []))]
    drawn = ("timeseries", "bargauge")
    by_title = {panel["title"]: panel for panel in every if panel["type"] in drawn}
    return [by_title[title] for title in PANELS[dashboard]]


def _answered(
    url: str, panel: dict[str, Any], began: float, ended: float, variables: dict[str, str]
) -> dict[str, Any]:
    """Return a panel with the series that Prometheus answers."""
    is_curve = panel["type"] == "timeseries"
    step_s = max(1, round((ended - began) / _CURVE_POINTS)) if is_curve else 1
    times = {
        "$__rate_interval": f"{max(step_s + 1, 4)}s",
        "$__interval": f"{step_s}s",
        "$__range": f"{round(ended - began)}s",
    }
    series = []
    for target in panel["targets"]:
        query = target["expr"]
        for name, value in {**times, **variables}.items():
            query = query.replace(name, value)
        asked: dict[str, Any] = {"query": query, "time": ended}
        if is_curve:
            asked = {"query": query, "start": began, "end": ended, "step": step_s}
        for each in _asked(url, "query_range" if is_curve else "query", asked):
            points = each["values"] if is_curve else [each["value"]]
            series.append(
                {
                    "legend": _legend(target["legendFormat"], each["metric"]),
                    "values": [
                        (round(at - began, 1), float(f"{float(value):.4g}"))
                        for at, value in points
                        if value != "NaN"
                    ],
                }
            )
    if not any(each["values"] for each in series):
        raise SystemExit(f"{panel['title']}: no data; use a run with a sidecar and longer trials")
    unit = panel["fieldConfig"]["defaults"]["unit"]
    return {"title": panel["title"], "type": panel["type"], "unit": unit, "series": series}


def _asked(url: str, path: str, parameters: dict[str, Any]) -> list[dict[str, Any]]:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"{url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}") as answer:
        found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
    return found


def _legend(text: str, labels: dict[str, str]) -> str:
    return re.sub(r"\{\{(\w+)\}\}", lambda found: labels.get(found[1], ""), text)


@contextmanager
def _prometheus(run_dir: Path, listen: str) -> Iterator[str]:
    """Yield the address of a Prometheus with the run."""
    words = [sys.executable, "-m", "paceline.cli", "monitor", str(run_dir), "--listen", listen]
    process = subprocess.Popen(guarded(words), stdout=sys.stderr)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    deadline = time.monotonic() + _READY_S
    try:
        while True:
            try:
                with opener.open(f"http://{listen}/-/ready"):
                    break
            except OSError:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise
            time.sleep(0.2)
        yield f"http://{listen}"
    finally:
        end_processes([process], 10)


if __name__ == "__main__":
    main()
