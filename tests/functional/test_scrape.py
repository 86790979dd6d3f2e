"""A real Prometheus finds sidecars by their target files and scrapes all that they know.

Secrets and TLS: tests/unit/telemetry.
"""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.functional.prometheus_api import Prometheus
from tests.functional.prometheus_server import LIMIT_S, active_targets, prometheus
from tests.support.rows import STEP, running_rank
from tests.support.snapshots import SNAPSHOT, served, values
from tests.support.waiting import wait_for

from paceline.collectives.host import host_name
from paceline.measure.records.files import JsonlWriter, read_json, read_jsonl, write_json
from paceline.measure.records.layout import TrialFiles
from paceline.measure.records.metrics import METRICS
from paceline.measure.records.metrics.metric import Row
from paceline.measure.telemetry import SidecarHandle, SidecarRequest
from paceline.measure.telemetry.exporter import MetricsServer, text_of
from paceline.measure.telemetry.request import remove_targets, target_text, write_targets
from paceline.plan.spec.models import TelemetrySettings

pytestmark = [pytest.mark.functional, pytest.mark.needs("prometheus")]


@dataclasses.dataclass(frozen=True)
class Endpoint:
    """A server of SNAPSHOT, and the target file that announces it."""

    targets: Path
    text: str

    @property
    def file(self) -> Path:
        return self.targets / f"{SNAPSHOT.host}.json"


@contextmanager
def endpoint(folder: Path) -> Iterator[Endpoint]:
    server = MetricsServer(served(), TelemetrySettings(), (0,))
    text = target_text(f"127.0.0.1:{server.port}", server.scheme)
    made = Endpoint(folder / "targets", text)
    write_targets([made.file], text)
    try:
        yield made
    finally:
        server.close()


@dataclasses.dataclass(frozen=True)
class Scraping:
    """One Prometheus for all: what it scrapes differs by its job."""

    api: Prometheus
    served: dict[str, Endpoint]
    busy: Path  # the targets of the job "busy", none at first

    def series(self, job: str, selector: str = "up") -> list[dict[str, Any]]:
        return self.api.instant(f'{selector} and on(job) up{{job="{job}"}}', time.time())

    def targets(self, job: str) -> list[dict[str, Any]]:
        return active_targets(self.api, job)


@pytest.fixture(scope="module")
def scraping(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scraping]:
    folder = tmp_path_factory.mktemp("scraping")
    with ExitStack() as stack:
        served = {job: stack.enter_context(endpoint(folder / job)) for job in ("plain", "twice")}
        twice = served["twice"]
        write_targets([twice.targets / "another.json"], twice.text)
        targets = {job: each.targets for job, each in served.items()}
        api = stack.enter_context(prometheus(folder, {**targets, "busy": folder / "busy"}))
        yield Scraping(api, served, folder / "busy")


def test_scraped_values_are_those_of_the_snapshot_until_the_run_ends(scraping: Scraping) -> None:
    wait_for(lambda: scraping.series("plain", "up == 1"), LIMIT_S, "a scrape")
    found = {
        (series["metric"]["__name__"], key(without_origin(series["metric"]))): float(
            series["value"][1]
        )
        for series in scraping.series("plain", '{__name__=~"paceline_.*"}')
    }
    assert found == values(text_of(METRICS, SNAPSHOT))
    remove_targets([scraping.served["plain"].file])
    wait_for(lambda: scraping.targets("plain") == [], LIMIT_S, "the target is gone")


def key(labels: dict[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(labels.items()))


def without_origin(labels: dict[str, str]) -> dict[str, str]:
    return {name: labels[name] for name in labels if name not in ("__name__", "job", "instance")}


def test_target_in_two_files_is_scraped_once(scraping: Scraping) -> None:
    assert len(list(scraping.served["twice"].targets.iterdir())) == 2
    wait_for(lambda: scraping.series("twice"), LIMIT_S, "a scrape")
    assert len(scraping.targets("twice")) == 1


HOST_FIGURES: dict[str, Callable[[Row], float | None]] = {
    "paceline_host_cpu_cores": lambda row: len(row["core_busy_s"]),
    "paceline_host_memory_used_bytes": lambda row: row["ram_used_bytes"],
    "paceline_sidecar_cpu_seconds_total": lambda row: row["sidecar_cpu_seconds"],
    "paceline_run_processes": lambda row: row["run_processes"],
    "paceline_run_threads": lambda row: row["run_threads"],
    "paceline_run_cpu_seconds_total": lambda row: row["run_cpu_seconds"],
    "paceline_run_resident_memory_bytes": lambda row: row["run_rss_bytes"],
}
RANK_FIGURES: dict[str, Callable[[Row], float | None]] = {
    "paceline_rank_cpu_seconds_total": lambda row: row["cpu_seconds"],
    "paceline_rank_resident_memory_bytes": lambda row: row["rss_bytes"],
    "paceline_rank_threads": lambda row: row["threads"],
}
SAMPLED = "paceline_sidecar_last_sample_timestamp_seconds"
# About a fifth of a core: enough for CPU times that grow.
BUSY = "import time\nwhile True: sum(range(100_000)); time.sleep(0.01)"
ROWS = 10


@pytest.fixture
def busy_ranks(tmp_path: Path) -> Iterator[TrialFiles]:
    """Two processes that compute now and then, and what ranks leave behind of 5 steps each."""
    files = TrialFiles(tmp_path / "trial")
    with ExitStack() as stack:
        for rank in range(2):
            process = stack.enter_context(subprocess.Popen([sys.executable, "-c", BUSY]))
            stack.callback(process.kill)
            write_json(files.rank(rank).status, running_rank(rank, process.pid))
            with JsonlWriter(files.rank(rank).steps) as steps:
                for step in range(5):
                    steps.write(dataclasses.replace(STEP, step=step))
        yield files


def test_scraped_figures_are_those_of_the_traces_rows(
    busy_ranks: TrialFiles, scraping: Scraping
) -> None:
    host = busy_ranks.host(host_name())
    api = scraping.api
    request = SidecarRequest(
        settings=TelemetrySettings(interval_s=0.1),
        pids=tuple(rank_pids(busy_ranks)),
        trace=host.trace,
        run="busy",
        trial_root=busy_ranks.root,
        run_targets=scraping.busy,
    )
    with ExitStack() as stack:
        sidecar = SidecarHandle(request)
        stack.callback(sidecar.stop)

        def is_scraped_often() -> bool:
            return len(set(scraped(api, SAMPLED).values())) >= ROWS

        wait_for(is_scraped_often, LIMIT_S, f"scrapes of {ROWS} ticks")
        sampled = scraped(api, SAMPLED)
        of_host = {name: scraped(api, name) for name in HOST_FIGURES}
        of_ranks = {
            (name, rank): scraped(api, name, rank=rank)
            for name in RANK_FIGURES
            for rank in range(2)
        }
        steps = [
            set(scraped(api, "paceline_training_steps_total", rank=rank).values())
            for rank in range(2)
        ]
    samples = rows_of(host.trace)
    for name, told in HOST_FIGURES.items():
        assert_same(of_host[name], sampled, {row["unix_s"]: told(row) for row in samples})
    ranks = rows_of(host.ranks)
    for (name, rank), found in of_ranks.items():
        told_of_rank = RANK_FIGURES[name]
        rows = {row["unix_s"]: told_of_rank(row) for row in ranks if row["rank"] == rank}
        assert_same(found, sampled, rows)
    assert steps == [{5.0}, {5.0}]
    assert list(scraping.busy.iterdir()) == []


def rank_pids(files: TrialFiles) -> Iterator[int]:
    for _, rank in files.ranks():
        yield read_json(rank.status)["pid"]


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [row for row in read_jsonl(path) if "unix_s" in row]


def scraped(api: Prometheus, name: str, **labels: object) -> dict[float, float]:
    """Values of one series of the job "busy" by the time of their scrape."""
    chosen = ",".join(f'{label}="{value}"' for label, value in {"job": "busy", **labels}.items())
    found = api.instant(f"{name}{{{chosen}}}[10m]", time.time())
    if not found:
        return {}
    (series,) = found
    return {at: float(value) for at, value in series["values"]}


def assert_same(
    values: dict[float, float], sampled: dict[float, float], rows: dict[float, float | None]
) -> None:
    """Each scrape has what the trace has of the tick that it tells of."""
    compared = {at: values[at] for at in values if sampled.get(at) in rows}
    assert len({sampled[at] for at in compared}) >= ROWS - 1
    assert compared == {at: rows[sampled[at]] for at in compared}
