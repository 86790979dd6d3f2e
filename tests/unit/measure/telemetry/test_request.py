"""The request to a sidecar."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from paceline.measure.telemetry.request import SidecarRequest
from paceline.plan.spec.models import TelemetrySettings


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


def test_unknown_settings_are_refused() -> None:
    with pytest.raises(ValidationError, match="Extra inputs"):
        SidecarRequest.model_validate({"run": "r", "trace": "t", "port": 1})
    with pytest.raises(ValidationError, match=r"facts: expected one of trial, workload.*'color'"):
        SidecarRequest.model_validate({"run": "r", "trace": "t", "facts": {"color": "red"}})


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
