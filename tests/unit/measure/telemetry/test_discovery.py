"""Target files of Prometheus's file-based service discovery."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.measure.telemetry.request import (
    SidecarRequest,
    address_of,
    remove_targets,
    target_files,
    target_text,
    write_targets,
)
from paceline.plan.spec.models import TelemetrySettings

TEXT = target_text("127.0.0.1:9464", "https")


def test_sidecar_is_announced_in_the_run_and_for_a_permanent_prometheus(tmp_path: Path) -> None:
    request = SidecarRequest(
        settings=TelemetrySettings(targets_dir=str(tmp_path / "all")),
        run="quick",
        trace=tmp_path / "t",
        run_targets=tmp_path / "targets",
    )
    files = target_files(request, "node-1")
    assert files == [
        tmp_path / "targets" / "node-1.json",
        tmp_path / "all" / "paceline-node-1-quick.json",
    ]
    write_targets(files, TEXT)
    for file in files:
        assert json.loads(file.read_text()) == [
            {"targets": ["127.0.0.1:9464"], "labels": {"__scheme__": "https"}}
        ]
    remove_targets(files, TEXT)
    assert not any(file.exists() for file in files)
    remove_targets(files, TEXT)  # a second time changes nothing


def test_target_of_another_sidecar_is_left(tmp_path: Path) -> None:
    file = tmp_path / "node-1.json"
    write_targets([file], target_text("127.0.0.1:1", "http"))
    remove_targets([file], TEXT)
    assert file.exists()
    remove_targets([file])
    assert not file.exists()


@pytest.mark.parametrize(
    ("listen", "address"),
    [
        ("127.0.0.1", "127.0.0.1:1"),
        ("::1", "[::1]:1"),
        ("0.0.0.0", "here:1"),
        ("::", "here:1"),
        ("fe80::1%eth0", "[fe80::1%eth0]:1"),
        ("name.example", "name.example:1"),
    ],
)
def test_address_is_one_that_can_be_reached(listen: str, address: str) -> None:
    assert address_of(listen, 1, "here") == address
