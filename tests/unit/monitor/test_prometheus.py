"""Prometheus's configuration and what it takes to start it."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import yaml

from paceline.errors import EnvironmentLacks, TimedOut, UsageError
from paceline.monitor.prometheus import (
    Access,
    Address,
    command,
    configuration,
    find_program,
    free_address,
    packaged,
    parse_address,
    wait_until_ready,
)


def test_configuration_scrapes_what_the_run_announces_and_no_path_is_in_it() -> None:
    document = yaml.safe_load(configuration(Access()))
    [job] = document["scrape_configs"]
    assert job["file_sd_configs"] == [{"files": ["../targets/*.json"], "refresh_interval": "5s"}]
    assert document["rule_files"] == ["rules/*.yml"]
    assert document["global"]["scrape_interval"] == "1s"
    assert not {"authorization", "basic_auth", "tls_config"} & set(job)


def test_token_stays_in_its_file_and_the_password_is_handed_on(tmp_path) -> None:
    token, basic, ca = (tmp_path / name for name in ("token", "basic", "ca.pem"))
    token.write_text("secret")
    basic.write_text("reader:pass:word\n")
    ca.write_text("PEM")
    job = Access(bearer_token_file=token, ca_file=ca).settings()
    assert job == {
        "authorization": {"credentials_file": str(token)},
        "tls_config": {"ca_file": str(ca)},
    }
    job = Access(basic_auth_file=basic).settings()
    assert job == {"basic_auth": {"username": "reader", "password": "pass:word"}}


def test_file_without_user_and_password_is_refused(tmp_path) -> None:
    (tmp_path / "basic").write_text("only-a-user\n")
    with pytest.raises(UsageError, match="USER:PASSWORD"):
        Access(basic_auth_file=tmp_path / "basic").settings()


def test_password_file_that_cannot_be_read_is_named(tmp_path, monkeypatch) -> None:
    path = tmp_path / "basic"
    path.write_bytes(b"reader:\xff\xfe\n")
    expected = rf"--basic-auth-file {path}: expected a readable file: "
    with pytest.raises(UsageError, match=f"{expected}.*codec"):
        Access(basic_auth_file=path).settings()

    def refuse(*_words: object) -> str:
        raise PermissionError("Permission denied")

    monkeypatch.setattr(Path, "read_text", refuse)
    with pytest.raises(UsageError, match=f"{expected}Permission denied"):
        Access(basic_auth_file=path).settings()


@pytest.mark.parametrize(
    ("text", "address", "url"),
    [
        ("127.0.0.1:9090", Address("127.0.0.1", 9090), "http://127.0.0.1:9090"),
        ("[::1]:0", Address("::1", 0), "http://[::1]:0"),
        ("localhost:80", Address("localhost", 80), "http://localhost:80"),
    ],
)
def test_addresses_are_read(text, address, url) -> None:
    assert parse_address(text) == address
    assert parse_address(text).url == url


@pytest.mark.parametrize("text", ["9090", ":9090", "127.0.0.1:", "127.0.0.1:x", "h:70000", ""])
def test_what_is_no_address_is_refused(text) -> None:
    with pytest.raises(UsageError, match="expected HOST:PORT"):
        parse_address(text)


def test_port_0_becomes_one_that_is_free() -> None:
    found = free_address(Address("127.0.0.1", 0))
    assert found.host == "127.0.0.1"
    assert found.port > 0


def test_port_that_is_taken_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(EnvironmentLacks, match=f"127.0.0.1:{port}.*--listen"):
            free_address(Address("127.0.0.1", port))


def test_missing_program_is_named_with_where_to_get_it(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EnvironmentLacks, match=r"promtool: not found.*apt-get.*paceline watch"):
        find_program("promtool")


def test_command_listens_where_it_is_told_and_keeps_old_runs() -> None:
    argv = command("prometheus", "prometheus.yml", "data", Address("127.0.0.1", 9090))
    assert "--web.listen-address=127.0.0.1:9090" in argv
    assert "--storage.tsdb.retention.time=3650d" in argv


def test_package_has_rules_and_dashboards() -> None:
    assert set(packaged("rules")) == {"alerts.yml", "recording.yml"}
    assert set(packaged("dashboards")) == {"run.json", "compare.json", "cluster.json"}


def test_one_that_never_answers_is_given_up() -> None:
    nobody = free_address(Address("127.0.0.1", 0))
    with pytest.raises(TimedOut, match="not ready"):
        wait_until_ready(nobody, lambda: None, limit_s=0.3)


def test_waiting_ends_with_the_program() -> None:
    def ended() -> None:
        raise EnvironmentLacks("it ended")

    with pytest.raises(EnvironmentLacks, match="it ended"):
        wait_until_ready(Address("127.0.0.1", 9), ended)
