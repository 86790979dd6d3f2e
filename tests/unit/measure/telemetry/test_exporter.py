"""The metrics endpoint: what it serves, over which protocol, and to whom."""

from __future__ import annotations

import gzip
import http.client
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.snapshots import SNAPSHOT, served, values
from tests.support.waiting import wait_for

from paceline.base.errors import UsageError
from paceline.measure.records.metrics import METRICS
from paceline.measure.telemetry import exporter
from paceline.measure.telemetry.exporter import (
    LatestSnapshot,
    MetricsServer,
    text_of,
    with_gauges_of,
)
from paceline.plan.spec.models import TelemetrySettings

needs_openssl = pytest.mark.skipif(
    shutil.which("openssl") is None, reason="the command openssl is not installed"
)


@contextmanager
def serving(settings: TelemetrySettings | None = None) -> Iterator[int]:
    with closing(MetricsServer(served(), settings or TelemetrySettings(), (0,))) as server:
        yield server.port


def ask(
    port: int, tls: ssl.SSLContext | None = None, **headers: str
) -> tuple[int, bytes, dict[str, str]]:
    connection = (
        http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        if tls is None
        else http.client.HTTPSConnection("127.0.0.1", port, timeout=5, context=tls)
    )
    with closing(connection):
        connection.request("GET", "/metrics", headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read(), dict(answer.headers)


def test_series_are_exactly_what_the_snapshot_has() -> None:
    host, run = ("host", "node-1"), ("run", "quick")
    rank = (host, ("rank", "1"), run)
    operation = (host, ("operation", "allreduce"), *rank[1:])
    found = values(text_of(METRICS, SNAPSHOT))
    training = {key: found.pop(key) for key in list(found) if "training" in key[0]}
    assert found == {
        ("paceline_host_cpu_seconds_total", (host, ("mode", "user"))): 1.5,
        ("paceline_host_cpu_seconds_total", (host, ("mode", "idle"))): 3.0,
        ("paceline_host_memory_used_bytes", (host,)): 100.0,
        ("paceline_gpu_info", (("gpu", "0"), host, ("name", "H200"))): 1.0,
        ("paceline_gpu_utilization_ratio", (("gpu", "0"), host)): 0.25,
        ("paceline_cgroup_cpu_limit_cores", (host, run)): 1.5,
        ("paceline_run_info", (host, ("launcher", "mpi"), run, ("trial", "t"))): 1.0,
        ("paceline_run_processes", (host, run)): 2.0,
        ("paceline_run_context_switches_total", (host, ("kind", "voluntary"), run)): 7.0,
        ("paceline_rank_cpu_seconds_total", rank): 2.5,
        ("paceline_rank_threads", rank): 3.0,
        ("paceline_rank_failed", rank): 0.0,
        ("paceline_communication_operations_total", operation): 4.0,
        ("paceline_communication_payload_bytes_total", operation): 0.0,
        ("paceline_communication_seconds_total", operation): 0.5,
        ("paceline_sidecar_last_sample_timestamp_seconds", (host, run)): 1700000000.5,
    }
    assert training["paceline_training_steps_total", rank] == 3.0
    assert training["paceline_training_samples_total", rank] == 48.0
    assert training["paceline_training_loss", rank] == 2.25
    assert training["paceline_training_step_seconds_count", rank] == 3.0
    assert training["paceline_training_step_seconds_sum", rank] == 0.25
    bucket = (host, ("le", "0.05"), *rank[1:])
    assert training["paceline_training_step_seconds_bucket", bucket] == 1.0


def test_before_the_first_tick_nothing_is_served() -> None:
    assert list(LatestSnapshot(METRICS).collect()) == []


def test_value_that_is_read_seldom_shows_its_last_reading() -> None:
    source = served()
    source.update(replace(SNAPSHOT, row={**SNAPSHOT.row, "run_pss_bytes": 900, "gpus": {}}))
    source.update(replace(SNAPSHOT, row={"unix_s": 2.0, "run_pss_bytes": None}, ranks={}))
    snapshot = source.snapshot
    assert snapshot is not None
    assert (snapshot.row["unix_s"], snapshot.row["run_pss_bytes"]) == (2.0, 900)
    assert snapshot.row["gpus"]["0"]["name"] == "H200"
    assert snapshot.ranks[1]["threads"] == 3


def test_last_values_have_the_memory_of_the_last_live_tick() -> None:
    alive = replace(
        SNAPSHOT,
        row={"run_processes": 2, "run_rss_bytes": 5, "run_cpu_seconds": 1.0},
        ranks={0: {"processes": 1, "rss_bytes": 7, "cpu_seconds": 1.0}},
    )
    ended = replace(
        SNAPSHOT,
        row={"run_processes": 0, "run_rss_bytes": 0, "run_cpu_seconds": 2.0},
        ranks={0: {"processes": 0, "rss_bytes": 0, "cpu_seconds": 2.0}},
    )
    last = with_gauges_of(alive, ended, METRICS)
    assert last.row == {"run_processes": 0, "run_rss_bytes": 5, "run_cpu_seconds": 2.0}
    assert last.ranks[0] == {"processes": 0, "rss_bytes": 7, "cpu_seconds": 2.0}


def test_scrape_is_text_and_compressed_on_request() -> None:
    with serving() as port:
        status, body, _ = ask(port)
        assert status == 200
        assert values(body.decode()) == values(text_of(METRICS, SNAPSHOT))
        _, packed, headers = ask(port, **{"Accept-Encoding": "gzip"})
        assert headers["Content-Encoding"] == "gzip"
        assert gzip.decompress(packed) == body


def test_port_that_is_taken_gives_way_to_the_next() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with closing(MetricsServer(served(), TelemetrySettings(), (port, 0))) as server:
            assert server.port not in (0, port)
        with pytest.raises(OSError, match=f"127.0.0.1:{port}"):
            MetricsServer(served(), TelemetrySettings(), (port,))
    for _ in range(2):  # a port is free again after closing
        MetricsServer(served(), TelemetrySettings(), (port,)).close()


def test_only_clients_with_the_token_are_answered(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("s3cret\n")
    token.chmod(0o600)
    with serving(TelemetrySettings(bearer_token_file=str(token))) as port:
        status, body, _ = ask(port)
        assert status == 401
        assert b"paceline_" not in body
        assert ask(port, Authorization="Bearer s3cret")[0] == 200


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the certificate and the key of three names."""
    folder = tmp_path_factory.mktemp("certificates")
    for name in ("server", "client", "unknown"):
        command = [
            "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
            "-nodes", "-days", "2", "-subj", f"/CN={name}", "-addext",
            "subjectAltName=IP:127.0.0.1", "-keyout", f"{name}.key", "-out", f"{name}.pem",
        ]  # fmt: skip
        subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=30)
        (folder / f"{name}.key").chmod(0o600)
    return folder


def over_tls(folder: Path, key: str = "server.key", **more: str) -> TelemetrySettings:
    return TelemetrySettings(
        tls_certificate=str(folder / "server.pem"), tls_key=str(folder / key), **more
    )


def trusting(folder: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=folder / "server.pem")


@needs_openssl
def test_metrics_are_served_over_tls_only(certificates: Path) -> None:
    with serving(over_tls(certificates)) as port:
        assert ask(port, trusting(certificates))[0] == 200
        with pytest.raises((http.client.HTTPException, OSError)):
            ask(port)
        assert ask(port, trusting(certificates))[0] == 200


@needs_openssl
def test_tls_before_1_2_is_refused(certificates: Path) -> None:
    old = trusting(certificates)
    old.set_ciphers("ALL:@SECLEVEL=0")
    old.minimum_version = ssl.TLSVersion.MINIMUM_SUPPORTED
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        old.maximum_version = ssl.TLSVersion.TLSv1_1
    with serving(over_tls(certificates)) as port, pytest.raises(ssl.SSLError):
        ask(port, old)


@needs_openssl
def test_clients_must_show_a_certificate_if_required(certificates: Path) -> None:
    known, unknown = trusting(certificates), trusting(certificates)
    known.load_cert_chain(certificates / "client.pem", certificates / "client.key")
    unknown.load_cert_chain(certificates / "unknown.pem", certificates / "unknown.key")
    with serving(over_tls(certificates, tls_client_ca=str(certificates / "client.pem"))) as port:
        assert ask(port, known)[0] == 200
        for refused in (unknown, trusting(certificates)):
            with pytest.raises(OSError, match=r"alert|reset|EOF|closed"):
                ask(port, refused)


def end_s(client: socket.socket) -> float:
    """Return after how many seconds the server ends a connection that sends a byte now and then."""
    began_s = time.monotonic()
    client.settimeout(0.1)
    while time.monotonic() - began_s < 10:
        try:
            client.sendall(b"G")
            if client.recv(1) == b"":
                break
        except TimeoutError:
            pass
        except OSError:
            break
    return time.monotonic() - began_s


def test_slow_client_is_ended_without_a_trace(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(exporter, "_CLIENT_LIMIT_S", 1.0)
    with serving() as port:
        with socket.create_connection(("127.0.0.1", port)) as client:
            assert end_s(client) < 5
        assert ask(port)[0] == 200
        with socket.create_connection(("127.0.0.1", port)) as silent:
            silent.settimeout(5)
            assert silent.recv(1) == b""
    assert capfd.readouterr().err == ""


def is_answered(port: int) -> bool:
    try:
        return ask(port)[0] == 200
    except OSError:  # the server refuses the connection
        return False


def test_clients_beyond_the_limit_are_refused_until_others_end() -> None:
    with serving() as port:
        clients = [socket.create_connection(("127.0.0.1", port), timeout=5) for _ in range(40)]
        for client in clients[16:]:
            assert client.recv(1) == b""
        for client in clients:
            client.close()
        wait_for(lambda: is_answered(port), 5, "an answer")


@needs_openssl
def test_client_without_a_handshake_does_not_block_others(certificates: Path) -> None:
    with (
        serving(over_tls(certificates)) as port,
        socket.create_connection(("127.0.0.1", port), timeout=5),
    ):
        assert ask(port, trusting(certificates))[0] == 200


@needs_openssl
def test_key_of_another_certificate_is_refused(certificates: Path) -> None:
    with pytest.raises(UsageError, match="expected PEM files"):
        MetricsServer(served(), over_tls(certificates, key="client.key"), (0,))
