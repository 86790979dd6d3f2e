"""The request to a sidecar, and the command line that gives one."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from pydantic import ValidationError

from paceline.errors import UsageError
from paceline.spec import TelemetrySettings
from paceline.telemetry.request import SidecarRequest, add_arguments, request_from


def parsed(*words: str) -> SidecarRequest:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return request_from(parser.parse_args(words))


def test_request_survives_the_way_as_json(tmp_path: Path) -> None:
    request = SidecarRequest(
        settings=TelemetrySettings(interval_s=0.5, tls_certificate="c", tls_key="k"),
        run="r",
        trace=tmp_path / "trace.jsonl",
        pids=(1, 2),
        trial_root=tmp_path,
        facts={"trial": "t"},
    )
    assert SidecarRequest.model_validate_json(request.model_dump_json()) == request


def test_all_options_are_understood() -> None:
    request = parsed(
        *("--listen", "[::1]:9464", "--interval", "0.5", "--pid", "5", "--pid", "6"),
        *("--out", "folder/trace.jsonl", "--state", "s.json", "--info", "trial=a=b"),
        *("--run", "quick", "--tls-certificate", "c", "--tls-key", "k", "--tls-client-ca", "ca"),
        *("--bearer-token-file", "t", "--targets-dir", "d", "--textfile-dir", "x"),
        *("--max-lifetime", "60"),
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
    assert request.facts == {"trial": "a=b"}


def test_defaults_serve_no_metrics_and_name_the_run_after_the_folder(tmp_path: Path) -> None:
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
        (("--pid", "0"), "expected a process id, got 0"),
        (("--info", "trial"), "expected KEY=VALUE"),
        (("--info", "color=red"), "info: expected one of trial, workload"),
        (("--max-lifetime", "0"), "max_lifetime_s"),
        (("--tls-key", "k"), "tls_certificate and tls_key"),
    ],
)
def test_fault_is_named(words: tuple[str, ...], fault: str) -> None:
    with pytest.raises(UsageError, match=fault):
        parsed("--out", "t", *words)


def test_unknown_settings_are_refused() -> None:
    with pytest.raises(ValidationError, match="Extra inputs"):
        SidecarRequest.model_validate({"run": "r", "trace": "t", "port": 1})


def request(port: int, targets: str | None = "/runs/a/targets") -> SidecarRequest:
    return SidecarRequest(
        settings=TelemetrySettings(listen_port=port),
        run="a",
        trace=Path("t"),
        run_targets=None if targets is None else Path(targets),
    )


def test_port_of_the_settings_is_the_only_choice() -> None:
    assert request(9464).ports("h") == (9464,)


def test_trials_of_a_run_choose_the_same_port_on_a_host() -> None:
    first, fallback = request(0).ports("h")
    assert (first, fallback) == request(0).ports("h")
    assert fallback == 0
    assert 20000 <= first < 32000
    others = {request(0, f"/runs/{n}/targets").ports("h")[0] for n in range(20)}
    others |= {request(0).ports(f"host-{n}")[0] for n in range(20)}
    assert len(others) > 30
    assert request(0, None).ports("h") == (0,)
