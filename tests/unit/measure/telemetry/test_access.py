"""Secrets of the metrics endpoint: who may read the files, and what clients must send."""

from __future__ import annotations

import base64
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from wsgiref.types import StartResponse, WSGIEnvironment

import pytest

from paceline.base.errors import UsageError
from paceline.measure.telemetry.request import caution, expected_authorization, guarded
from paceline.plan.spec.models import TelemetrySettings

PASSWORD = "prom:pa:ss wörd"


def secret(path: Path, text: str, mode: int = 0o600) -> str:
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def basic(pair: str) -> str:
    return "Basic " + base64.b64encode(pair.encode()).decode()


def status_of(settings: TelemetrySettings, authorization: str | None) -> tuple[str, dict[str, str]]:
    """Ask once; the status and the headers."""
    answered: list[Any] = []

    def metrics(_: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        start_response("200 OK", [])
        return [b"up 1\n"]

    def start_response(status: str, headers: list[tuple[str, str]], *_: Any) -> Any:
        answered[:] = [status[:3], dict(headers)]

    expected = expected_authorization(settings)
    assert expected is not None
    environ = {} if authorization is None else {"HTTP_AUTHORIZATION": authorization}
    list(guarded(metrics, *expected)(environ, start_response))
    return answered[0], answered[1]


@pytest.mark.parametrize(
    ("kind", "authorization", "status"),
    [
        ("Basic", basic(PASSWORD), "200"),
        ("Basic", basic(PASSWORD).replace("Basic", "basic"), "200"),
        ("Basic", None, "401"),
        ("Basic", "", "401"),
        ("Basic", "Basic", "401"),
        ("Basic", basic("prom:pa:ss wör"), "401"),
        ("Basic", basic("Prom:pa:ss wörd"), "401"),
        ("Basic", basic("prom:"), "401"),
        ("Basic", "Bearer " + basic(PASSWORD).split()[1], "401"),
        ("Basic", "Basic %%%", "401"),
        ("Bearer", "Bearer s3cret", "200"),
        ("Bearer", "bearer s3cret", "200"),
        ("Bearer", "Bearer s3cre", "401"),
        ("Bearer", "Bearer s3cret2", "401"),
        ("Bearer", "Bearer ", "401"),
        ("Bearer", None, "401"),
        ("Bearer", "Basic s3cret", "401"),
        ("Bearer", "Bearer s3cret\xff", "401"),
    ],
)
def test_secret_is_required(tmp_path, kind, authorization, status) -> None:
    file = secret(tmp_path / "secret", f"{PASSWORD if kind == 'Basic' else 's3cret'}\n")
    name = {"Basic": "basic_auth_file", "Bearer": "bearer_token_file"}[kind]
    found, headers = status_of(TelemetrySettings(**{name: file}), authorization)
    assert found == status
    if status == "401":
        assert headers["WWW-Authenticate"] == f'{kind} realm="paceline"'


def test_without_a_secret_nothing_is_required() -> None:
    assert expected_authorization(TelemetrySettings()) is None


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o620])
@pytest.mark.parametrize("name", ["bearer_token_file", "basic_auth_file", "tls_key"])
def test_file_that_others_may_read_is_refused(tmp_path, name, mode) -> None:
    file = secret(tmp_path / "secret", "user:s3cret", mode)
    more = {"tls_certificate": "c"} if name == "tls_key" else {}
    with pytest.raises(UsageError, match=f"{name}.*chmod 600.*{mode:04o}"):
        expected_authorization(TelemetrySettings(**{name: file}, **more))


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "expected 1 to 65536 bytes, got 0"),
        ("x" * 70000, "expected 1 to 65536 bytes"),
        ("user\n", "USER:PASSWORD"),
        (":password\n", "USER:PASSWORD"),
        ("user:\n", "USER:PASSWORD"),
        ("user:password\nother:password\n", "expected one line, got several"),
    ],
)
def test_password_file_without_a_password_is_refused(tmp_path: Path, text: str, fault: str) -> None:
    file = secret(tmp_path / "password", text)
    with pytest.raises(UsageError, match=fault):
        expected_authorization(TelemetrySettings(basic_auth_file=file))


def test_missing_secret_is_refused(tmp_path: Path) -> None:
    settings = TelemetrySettings(bearer_token_file=str(tmp_path / "none"))
    with pytest.raises(UsageError, match="bearer_token_file: expected a readable file"):
        expected_authorization(settings)


@pytest.mark.parametrize(
    ("listen_host", "tls", "warns"),
    [
        ("127.0.0.1", False, False),
        ("::1", False, False),
        ("10.0.0.1", False, True),
        ("10.0.0.1", True, False),
    ],
)
def test_unencrypted_secret_is_warned_about(listen_host: str, tls: bool, warns: bool) -> None:
    files = {"tls_certificate": "c", "tls_key": "k"} if tls else {}
    settings = TelemetrySettings(listen_host=listen_host, bearer_token_file="token", **files)
    assert (caution(settings) is not None) == warns
