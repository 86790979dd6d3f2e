"""Who may ask for metrics: TLS of 1.2 or later, certificates of clients, passwords, tokens."""

from __future__ import annotations

import base64
import dataclasses
import http.client
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from paceline.errors import UsageError
from paceline.telemetry import web
from paceline.telemetry.web import WebServer, WebSettings, guarded

if TYPE_CHECKING:
    from collections.abc import Iterable
    from wsgiref.types import StartResponse, WSGIEnvironment

needs_openssl = pytest.mark.skipif(
    shutil.which("openssl") is None, reason="the command openssl is not installed"
)


def metrics(_environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
    start_response("200 OK", [("Content-Type", "text/plain")])
    return [b"up 1\n"]


@contextmanager
def serving(settings: WebSettings) -> Iterator[int]:
    """The port of a server in another thread."""
    server = WebServer(guarded(metrics, settings.credentials()), "127.0.0.1", 0, settings.tls())
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=5)


def ask(
    port: int,
    authorization: str | bytes | None = None,
    tls: ssl.SSLContext | None = None,
    path: str = "/metrics",
) -> http.client.HTTPResponse:
    connection = (
        http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        if tls is None
        else http.client.HTTPSConnection("127.0.0.1", port, timeout=5, context=tls)
    )
    headers = {} if authorization is None else {"Authorization": authorization}
    with closing(connection):
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        answer.read()
        return answer


def basic(pair: str) -> str:
    return "Basic " + base64.b64encode(pair.encode()).decode()


def secret(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def test_without_settings_anybody_may_ask() -> None:
    with serving(WebSettings()) as port:
        assert ask(port).status == 200
        assert ask(port, path="/").status == 404


@pytest.mark.parametrize(
    ("authorization", "status"),
    [
        (basic("prom:pa:ss wörd"), 200),
        (basic("prom:pa:ss wörd").replace("Basic", "basic"), 200),
        (None, 401),
        ("", 401),
        ("Basic", 401),
        (basic("prom:pa:ss wör"), 401),
        (basic("Prom:pa:ss wörd"), 401),
        (basic("prom:"), 401),
        ("Bearer " + basic("prom:pa:ss wörd").split()[1], 401),
        (b"Basic %%%", 401),
    ],
)
def test_password_is_asked_for(tmp_path: Path, authorization: str, status: int) -> None:
    file = secret(tmp_path / "password", "prom:pa:ss wörd\n")
    with serving(WebSettings(basic_auth_file=file)) as port:
        answer = ask(port, authorization)
    assert answer.status == status
    if status == 401:
        assert answer.headers["WWW-Authenticate"] == 'Basic realm="paceline"'


@pytest.mark.parametrize(
    ("authorization", "status"),
    [
        ("Bearer s3cret", 200),
        ("bearer s3cret", 200),
        ("Bearer s3cre", 401),
        ("Bearer s3cret2", 401),
        ("Bearer ", 401),
        (None, 401),
        ("Basic s3cret", 401),
        (b"Bearer s3cret\xff", 401),
    ],
)
def test_token_is_asked_for(tmp_path: Path, authorization: str | bytes, status: int) -> None:
    file = secret(tmp_path / "token", "s3cret\n")
    with serving(WebSettings(bearer_token_file=file)) as port:
        assert ask(port, authorization).status == status


def test_without_the_secret_not_even_paths_are_told(tmp_path: Path) -> None:
    file = secret(tmp_path / "token", "s3cret")
    with serving(WebSettings(bearer_token_file=file)) as port:
        assert ask(port, path="/nowhere").status == 401


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o620])
def test_secret_that_others_can_get_at_is_refused(tmp_path: Path, mode: int) -> None:
    file = secret(tmp_path / "token", "s3cret", mode)
    with pytest.raises(UsageError, match=f"chmod 600.*{mode:04o}"):
        WebSettings(bearer_token_file=file).credentials()


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "expected 1 to 4096 bytes, got 0"),
        ("x" * 5000, "expected 1 to 4096 bytes"),
        ("user\n", "USER:PASSWORD"),
        (":password\n", "USER:PASSWORD"),
        ("user:\n", "USER:PASSWORD"),
        ("user:password\nother:password\n", "expected one line, got several"),
    ],
)
def test_password_file_that_holds_none_is_refused(tmp_path: Path, text: str, fault: str) -> None:
    file = secret(tmp_path / "password", text)
    with pytest.raises(UsageError, match=fault):
        WebSettings(basic_auth_file=file).credentials()


def test_secret_that_is_missing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="bearer_token_file: expected a file"):
        WebSettings(bearer_token_file=tmp_path / "none").credentials()


def test_both_kinds_of_secret_at_once_are_refused(tmp_path: Path) -> None:
    file = secret(tmp_path / "both", "a:b")
    with pytest.raises(UsageError, match="got both"):
        WebSettings(basic_auth_file=file, bearer_token_file=file).credentials()


@pytest.mark.parametrize(
    ("listen_host", "tls", "cautions"),
    [("127.0.0.1", False, 0), ("::1", False, 0), ("10.0.0.1", False, 1), ("10.0.0.1", True, 0)],
)
def test_secret_in_the_open_is_cautioned_against(
    listen_host: str, tls: bool, cautions: int
) -> None:
    settings = WebSettings(
        bearer_token_file=Path("token"), tls_certificate=Path("c") if tls else None
    )
    assert len(settings.cautions(listen_host)) == cautions


def test_key_without_certificate_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="need tls_certificate"):
        WebSettings(tls_key=tmp_path / "key").tls()


def openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True, timeout=30)


@dataclasses.dataclass(frozen=True)
class Certificate:
    certificate: Path
    key: Path


def self_signed(folder: Path, name: str) -> Certificate:
    made = Certificate(folder / f"{name}.pem", folder / f"{name}.key")
    openssl(
        "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
        "-days", "2", "-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1",
        "-keyout", made.key, "-out", made.certificate,
    )  # fmt: skip
    made.key.chmod(0o600)
    return made


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Certificate]:
    folder = tmp_path_factory.mktemp("certificates")
    return {name: self_signed(folder, name) for name in ("server", "client", "stranger")}


def trusting(server: Certificate) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=server.certificate)


@needs_openssl
def test_metrics_come_over_tls(certificates: dict[str, Certificate]) -> None:
    server = certificates["server"]
    settings = WebSettings(tls_certificate=server.certificate, tls_key=server.key)
    assert settings.scheme == "https"
    with serving(settings) as port:
        assert ask(port, tls=trusting(server)).status == 200
        with pytest.raises((http.client.HTTPException, OSError)):
            ask(port)
        assert ask(port, tls=trusting(server)).status == 200


@needs_openssl
def test_tls_before_1_2_is_refused(certificates: dict[str, Certificate]) -> None:
    server = certificates["server"]
    settings = WebSettings(tls_certificate=server.certificate, tls_key=server.key)
    context = settings.tls()
    assert context is not None
    assert context.minimum_version == ssl.TLSVersion.TLSv1_2
    old = trusting(server)
    old.set_ciphers("ALL:@SECLEVEL=0")
    old.minimum_version = ssl.TLSVersion.MINIMUM_SUPPORTED
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        old.maximum_version = ssl.TLSVersion.TLSv1_1
    with serving(settings) as port, pytest.raises(ssl.SSLError):
        ask(port, tls=old)


@needs_openssl
def test_clients_must_show_a_certificate_where_that_is_asked(
    certificates: dict[str, Certificate],
) -> None:
    server, client = certificates["server"], certificates["client"]
    settings = WebSettings(
        tls_certificate=server.certificate,
        tls_key=server.key,
        tls_client_ca=client.certificate,
    )
    known, unknown = trusting(server), trusting(server)
    known.load_cert_chain(client.certificate, client.key)
    stranger = certificates["stranger"]
    unknown.load_cert_chain(stranger.certificate, stranger.key)
    with serving(settings) as port:
        assert ask(port, tls=known).status == 200
        for refused in (unknown, trusting(server)):
            with pytest.raises(OSError, match=r"alert|reset|EOF|closed"):
                ask(port, tls=refused)


@needs_openssl
def test_client_that_does_not_shake_hands_keeps_nobody_waiting(
    certificates: dict[str, Certificate],
) -> None:
    server = certificates["server"]
    settings = WebSettings(tls_certificate=server.certificate, tls_key=server.key)
    with (
        serving(settings) as port,
        socket.create_connection(("127.0.0.1", port), timeout=5),
    ):
        assert ask(port, tls=trusting(server)).status == 200


def test_connections_beyond_the_limit_are_closed_and_come_free_again() -> None:
    with serving(WebSettings()) as port:
        silent = [socket.create_connection(("127.0.0.1", port), timeout=5) for _ in range(16)]
        with socket.create_connection(("127.0.0.1", port), timeout=5) as refused:
            assert refused.recv(1) == b""
        for connection in silent:
            connection.close()
        limit_s = time.monotonic() + 5
        while True:
            try:
                assert ask(port).status == 200
                break
            except OSError:
                assert time.monotonic() < limit_s
                time.sleep(0.02)


def test_client_that_dawdles_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "_CONNECTION_S", 0.05)
    with (
        serving(WebSettings()) as port,
        socket.create_connection(("127.0.0.1", port), timeout=5) as dawdler,
    ):
        dawdler.sendall(b"GET /metrics HTTP/1.1\r\nX-Never-Ending: ")
        assert dawdler.recv(1) == b""


@needs_openssl
def test_client_that_dawdles_is_cut_off_over_tls(
    certificates: dict[str, Certificate], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web, "_CONNECTION_S", 0.5)
    server = certificates["server"]
    settings = WebSettings(tls_certificate=server.certificate, tls_key=server.key)
    with (
        serving(settings) as port,
        socket.create_connection(("127.0.0.1", port), timeout=5) as plain,
        trusting(server).wrap_socket(plain, server_hostname="127.0.0.1") as dawdler,
    ):
        dawdler.sendall(b"GET /metrics HTTP/1.1\r\nX-Never-Ending: ")
        assert cut_off(dawdler)


def cut_off(connection: ssl.SSLSocket) -> bool:
    try:
        return connection.recv(1) == b""
    except (ssl.SSLEOFError, ConnectionResetError):
        return True


@needs_openssl
def test_key_that_others_can_read_is_refused(
    tmp_path: Path, certificates: dict[str, Certificate]
) -> None:
    server = certificates["server"]
    key = secret(tmp_path / "key", server.key.read_text(), 0o644)
    with pytest.raises(UsageError, match=r"tls_key.*chmod 600"):
        WebSettings(tls_certificate=server.certificate, tls_key=key).tls()


@needs_openssl
def test_key_of_another_certificate_is_refused(certificates: dict[str, Certificate]) -> None:
    settings = WebSettings(
        tls_certificate=certificates["server"].certificate, tls_key=certificates["client"].key
    )
    with pytest.raises(UsageError, match="expected a certificate"):
        settings.tls()


@needs_openssl
def test_key_with_a_password_is_refused_without_asking_for_it(
    tmp_path: Path, certificates: dict[str, Certificate]
) -> None:
    server = certificates["server"]
    key = tmp_path / "locked.key"
    openssl("pkey", "-in", server.key, "-aes256", "-passout", "pass:secret", "-out", key)
    key.chmod(0o600)
    with pytest.raises(UsageError, match="without a password"):
        WebSettings(tls_certificate=server.certificate, tls_key=key).tls()


@needs_openssl
def test_client_ca_that_is_none_is_refused(
    tmp_path: Path, certificates: dict[str, Certificate]
) -> None:
    server = certificates["server"]
    authority = tmp_path / "ca.pem"
    authority.write_text("no certificate\n")
    settings = WebSettings(
        tls_certificate=server.certificate, tls_key=server.key, tls_client_ca=authority
    )
    with pytest.raises(UsageError, match="tls_client_ca: expected PEM"):
        settings.tls()
