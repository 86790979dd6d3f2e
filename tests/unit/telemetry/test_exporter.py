"""The Prometheus view of a tick: all values, promtool's approval, one loopback listener."""

from __future__ import annotations

import dataclasses
import gzip
import shutil
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as openmetrics_families,
)
from prometheus_client.parser import text_string_to_metric_families
from tests.unit.telemetry.full_tick import EXPECTED, FACTS, HOST, RUN, SAMPLE, TICK, WATCH, key

import paceline
from paceline.telemetry.exporter import LatestTick, MetricsServer
from paceline.telemetry.ticks import TrainingProgress

OPENMETRICS = {"Accept": "application/openmetrics-text; version=1.0.0"}


@pytest.fixture
def source() -> LatestTick:
    return LatestTick(HOST)


@pytest.fixture
def server(source: LatestTick) -> Iterator[MetricsServer]:
    server = MetricsServer(source, "127.0.0.1", 0)
    yield server
    server.close()


def get(server: MetricsServer, path: str = "/metrics", **headers: str) -> bytes:
    request = urllib.request.Request(f"http://127.0.0.1:{server.port}{path}", headers=headers)
    with urllib.request.urlopen(request, timeout=5) as answer:
        content: bytes = answer.read()
    return content


def scrape(server: MetricsServer) -> str:
    return get(server).decode()


def values(text: str) -> dict[str, float]:
    return {
        key(sample.name, sample.labels): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.name.endswith("_info")
    }


def test_scrape_tells_the_latest_tick_and_nothing_else(
    source: LatestTick, server: MetricsServer
) -> None:
    source.update(dataclasses.replace(TICK, samples=9))
    source.update(TICK)
    assert values(scrape(server)) == EXPECTED


def test_openmetrics_tells_the_same(source: LatestTick, server: MetricsServer) -> None:
    source.update(TICK)
    text = get(server, **OPENMETRICS).decode()
    found = {
        key(sample.name, sample.labels): sample.value
        for family in openmetrics_families(text)
        for sample in family.samples
        if not sample.name.endswith("_info")
    }
    assert found == EXPECTED


@pytest.mark.parametrize(
    ("accept", "kind"),
    [
        ("", "text/plain"),
        ("*/*", "text/plain"),
        ("application/openmetrics-text;version=1.0.0;q=0.5,text/plain;q=0.2", "text/plain"),
        ("application/openmetrics-text; version=1.0.0", "application/openmetrics-text"),
    ],
)
def test_openmetrics_is_for_those_who_take_nothing_else(
    accept: str, kind: str, server: MetricsServer
) -> None:
    address = f"http://127.0.0.1:{server.port}/metrics"
    request = urllib.request.Request(address, headers={"Accept": accept} if accept else {})
    with urllib.request.urlopen(request, timeout=5) as answer:
        assert answer.headers.get_content_type() == kind


def test_names_with_quotes_and_line_ends_reach_the_reader(
    source: LatestTick, server: MetricsServer
) -> None:
    facts = {**FACTS, "trial": "simple-big\n", "launcher": 'm"p\\i'}
    watch = dataclasses.replace(WATCH, facts=facts)
    source.update(dataclasses.replace(TICK, watches=(watch,)))
    families = {family.name: family for family in text_string_to_metric_families(scrape(server))}
    (sample,) = families["paceline_run_info"].samples
    assert sample.labels == {"host": HOST, "run": RUN, **facts}


def test_version_is_told(source: LatestTick, server: MetricsServer) -> None:
    source.update(TICK)
    assert f'version="{paceline.__version__}"' in scrape(server)


def test_before_the_first_tick_nothing_is_told(server: MetricsServer) -> None:
    assert scrape(server) == ""


def test_costly_figures_stay_as_last_read(source: LatestTick, server: MetricsServer) -> None:
    source.update(TICK)
    watch = dataclasses.replace(WATCH, sample=dataclasses.replace(SAMPLE, run_pss_bytes=None))
    source.update(dataclasses.replace(TICK, watches=(watch,)))
    assert values(scrape(server)) == EXPECTED


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_finds_no_fault_with_names_and_help(
    source: LatestTick, server: MetricsServer
) -> None:
    source.update(TICK)
    check = subprocess.run(
        ["promtool", "check", "metrics"],
        input=scrape(server),
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert (check.returncode, check.stdout, check.stderr) == (0, "", "")


def test_scrape_may_be_compressed(source: LatestTick, server: MetricsServer) -> None:
    source.update(TICK)
    content = get(server, **{"Accept-Encoding": "gzip"})
    assert gzip.decompress(content).decode() == scrape(server)


def test_scrape_may_choose_names(source: LatestTick, server: MetricsServer) -> None:
    source.update(TICK)
    found = values(get(server, "/metrics?name[]=paceline_run_threads").decode())
    at = key("paceline_run_threads", {"host": HOST, "run": RUN})
    assert found == {at: EXPECTED[at]}


def test_training_is_asked_for_by_scrapes_alone(source: LatestTick, server: MetricsServer) -> None:
    asked: list[int] = []
    progress = WATCH.training()

    def training() -> tuple[TrainingProgress, ...]:
        asked.append(1)
        return progress

    source.update(
        dataclasses.replace(TICK, watches=(dataclasses.replace(WATCH, training=training),))
    )
    assert not asked
    assert values(scrape(server)) == EXPECTED
    assert len(asked) == 1


def test_other_paths_are_not_found(source: LatestTick, server: MetricsServer) -> None:
    source.update(TICK)
    with pytest.raises(urllib.error.HTTPError, match="404"):
        get(server, "/")


def test_port_in_use_is_an_os_error(source: LatestTick, server: MetricsServer) -> None:
    with pytest.raises(OSError, match="in use"):
        MetricsServer(source, "127.0.0.1", server.port)


def test_closed_server_frees_its_port(source: LatestTick) -> None:
    server = MetricsServer(source, "127.0.0.1", 0)
    server.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", server.port), timeout=5)


def test_ipv6_loopback_can_be_asked_for(source: LatestTick) -> None:
    try:
        server = MetricsServer(source, "::1", 0)
    except OSError as error:
        pytest.skip(f"no IPv6 loopback here: {error}")
    try:
        with urllib.request.urlopen(f"http://[::1]:{server.port}/metrics", timeout=5) as answer:
            assert answer.status == 200
    finally:
        server.close()
