"""Targets for Prometheus: there while a sidecar serves, gone afterwards."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.telemetry.discovery import TargetFile, address_of


def groups(path: Path) -> object:
    return json.loads(path.read_text())


def test_target_of_a_run_is_named_after_its_host(tmp_path: Path) -> None:
    TargetFile.in_run(tmp_path / "targets", "node-1", "10.0.0.1:9464").write()
    assert groups(tmp_path / "targets" / "node-1.json") == [
        {"targets": ["10.0.0.1:9464"], "labels": {"__scheme__": "http"}}
    ]


def test_target_over_tls_says_so(tmp_path: Path) -> None:
    file = TargetFile.in_run(tmp_path, "node-1", "10.0.0.1:9464", "https")
    file.write()
    assert '"https"' in file.path.read_text()


def test_runs_of_one_host_have_a_file_each_with_the_same_target(tmp_path: Path) -> None:
    first = TargetFile.among_others(tmp_path, "node-1", "first", "10.0.0.1:9464")
    second = TargetFile.among_others(tmp_path, "node-1", "second", "10.0.0.1:9464")
    first.write()
    second.write()
    assert groups(first.path) == groups(second.path)
    first.remove()
    assert [path.name for path in tmp_path.iterdir()] == ["paceline-node-1-second.json"]


def test_nothing_but_the_target_is_left_for_prometheus_to_read(tmp_path: Path) -> None:
    file = TargetFile.in_run(tmp_path, "node-1", "10.0.0.1:9464")
    file.write()
    file.write()
    assert list(tmp_path.iterdir()) == [file.path]
    file.remove()
    assert list(tmp_path.iterdir()) == []


def test_target_of_a_later_sidecar_is_not_removed(tmp_path: Path) -> None:
    ended = TargetFile.in_run(tmp_path, "node-1", "10.0.0.1:9464")
    ended.write()
    later = TargetFile.in_run(tmp_path, "node-1", "10.0.0.1:9465")
    later.write()
    ended.remove()
    assert later.path.exists()


def test_target_that_is_gone_may_be_removed(tmp_path: Path) -> None:
    TargetFile.in_run(tmp_path, "node-1", "10.0.0.1:9464").remove()


@pytest.mark.parametrize(
    ("listen_host", "address"),
    [
        ("127.0.0.1", "127.0.0.1:9464"),
        ("10.0.0.1", "10.0.0.1:9464"),
        ("::1", "[::1]:9464"),
        ("fe80::1%eth0", "[fe80::1%eth0]:9464"),
        ("0.0.0.0", "node-1:9464"),
        ("::", "node-1:9464"),
        ("node-1.cluster", "node-1.cluster:9464"),
    ],
)
def test_address_is_one_that_prometheus_can_reach(listen_host: str, address: str) -> None:
    assert address_of(listen_host, 9464, "node-1") == address
