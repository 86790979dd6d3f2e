"""What Grafana is given."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import yaml

from paceline.monitor.grafana import command, environment, find_grafana, write_provisioning
from paceline.monitor.prometheus import Address

if TYPE_CHECKING:
    from pathlib import Path


def executable(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


def test_data_source_and_dashboards_are_provisioned(tmp_path) -> None:
    write_provisioning(tmp_path, "http://127.0.0.1:9090")
    sources = yaml.safe_load((tmp_path / "provisioning/datasources/paceline.yml").read_text())
    [source] = sources["datasources"]
    assert source["url"] == "http://127.0.0.1:9090"
    assert source["jsonData"]["timeInterval"] == "1s"
    providers = yaml.safe_load((tmp_path / "provisioning/dashboards/paceline.yml").read_text())
    [provider] = providers["providers"]
    folder = tmp_path / "dashboards"
    assert provider["options"]["path"] == str(folder)
    uids = {json.loads(path.read_text())["uid"] for path in folder.iterdir()}
    assert uids == {"paceline-run", "paceline-compare", "paceline-cluster"}


def test_readers_may_look_and_nobody_may_log_in_with_a_known_password(tmp_path) -> None:
    one, other = (environment(tmp_path, Address("127.0.0.1", 3000)) for _ in range(2))
    assert one["GF_SERVER_HTTP_ADDR"] == "127.0.0.1"
    assert one["GF_SERVER_HTTP_PORT"] == "3000"
    assert one["GF_AUTH_ANONYMOUS_ORG_ROLE"] == "Viewer"
    assert one["GF_AUTH_DISABLE_LOGIN_FORM"] == "true"
    assert len(one["GF_SECURITY_ADMIN_PASSWORD"]) > 20
    assert one["GF_SECURITY_ADMIN_PASSWORD"] != other["GF_SECURITY_ADMIN_PASSWORD"]


@pytest.mark.parametrize(("name", "arguments"), [("grafana", ["server"]), ("grafana-server", [])])
def test_server_is_found_under_its_new_and_its_old_name(
    tmp_path, monkeypatch, name, arguments
) -> None:
    program = executable(tmp_path / "bin" / name)
    monkeypatch.setenv("PATH", str(program.parent))
    assert find_grafana() == [str(program), *arguments]


def test_none_is_found_where_none_is(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_grafana() is None


def test_home_of_an_unpacked_archive_is_beside_its_program(tmp_path) -> None:
    program = executable(tmp_path / "grafana-12" / "bin" / "grafana")
    (tmp_path / "grafana-12" / "conf").mkdir()
    (tmp_path / "grafana-12" / "conf" / "defaults.ini").write_text("")
    argv = command([str(program), "server"])
    assert argv[-2:] == ["--homepath", str(tmp_path / "grafana-12")]


def test_home_of_a_packaged_program_is_the_packages(tmp_path) -> None:
    program = executable(tmp_path / "bin" / "grafana")
    assert command([str(program), "server"])[-1] == "/usr/share/grafana"
