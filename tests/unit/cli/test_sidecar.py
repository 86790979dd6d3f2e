"""`paceline sidecar`: its options are a request."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.base.errors import ExitCode
from paceline.cli import main, sidecar
from paceline.measure.telemetry.request import SidecarRequest
from paceline.plan.spec.models import TelemetrySettings


@pytest.fixture
def parsed(monkeypatch):
    """Return the request that the options make."""
    requests: list[SidecarRequest] = []
    monkeypatch.setattr(sidecar, "run_sidecar", requests.append)

    def parse(*words: str) -> SidecarRequest:
        assert main(["sidecar", *words]) == ExitCode.OK
        return requests[-1]

    return parse


def test_all_options_are_understood(parsed) -> None:
    request = parsed(
        *("--listen", "[::1]:9464", "--interval", "0.5", "--pid", "5,6"),
        *("--out", "folder/trace.jsonl", "--state", "s.json"),
        *("--run", "quick", "--tls-certificate", "c", "--tls-key", "k", "--tls-client-ca", "ca"),
        *("--bearer-token-file", "t", "--targets-dir", "d", "--textfile-dir", "x"),
        *("--limit", "60"),
    )
    assert request.settings == TelemetrySettings(
        interval_s=0.5,
        listen_host="::1",
        listen_port=9464,
        tls_certificate="c",
        tls_key="k",
        tls_client_ca="ca",
        bearer_token_file="t",
        targets_dir="d",
        textfile_dir="x",
    )
    assert (request.pids, request.run, request.max_lifetime_s) == ((5, 6), "quick", 60.0)
    assert (request.trace, request.state) == (Path("folder/trace.jsonl"), Path("s.json"))


def test_defaults_serve_no_metrics_and_name_the_run_after_the_folder(parsed, tmp_path) -> None:
    request = parsed("--out", str(tmp_path / "my-run" / "trace.jsonl"))
    assert not request.serves_metrics
    assert (request.run, request.pids, request.settings.interval_s) == ("my-run", (), 1.0)


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (("--listen", "9464"), "expected HOST:PORT"),
        (("--listen", ":9464"), "expected HOST:PORT"),
        (("--listen", "127.0.0.1:70000"), "listen_port"),
        (("--interval", "0.01"), "interval_s"),
        (("--pid", "0"), "pids[1]: input should be greater than 0, got 0"),
        (("--pid", "x"), "expected process ids, got 'x'"),
        (("--limit", "0"), "0.0 is not in the range x>0"),
        (("--tls-key", "k"), "tls_certificate and tls_key"),
    ],
)
def test_fault_is_named(capsys, words: tuple[str, ...], fault: str) -> None:
    assert main(["sidecar", "--out", "t", *words]) == ExitCode.USAGE
    assert fault in capsys.readouterr().err
