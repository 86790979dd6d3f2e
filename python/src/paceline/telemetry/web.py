"""Who may ask for metrics, and over what: TLS, passwords, tokens, and the HTTP server itself.

Without settings it is plain HTTP for everybody who reaches the address, which by default is
loopback. A setting that cannot be kept is an error: nothing is served less protected than asked.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import socket
import socketserver
import ssl
import stat
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from paceline.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path
    from typing import Any
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

METRICS_PATH = "/metrics"
_WAIT_S = 10.0  # for a client's next bytes; one that connects and says nothing
_CONNECTION_S = 30.0  # for all of a request; one that sends a byte now and then
_CONNECTIONS = 16  # at once; Prometheus needs one
_SECRET_BYTES = 4096
_KEY_BYTES = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class WebSettings:
    """[telemetry] of the spec; files are looked at when the server starts.

    The key and the secrets are refused where others than their owner may read them.
    """

    tls_certificate: Path | None = None  # PEM, with its chain
    tls_key: Path | None = None
    tls_client_ca: Path | None = None  # then clients must show a certificate of it
    basic_auth_file: Path | None = None  # one line USER:PASSWORD
    bearer_token_file: Path | None = None

    @property
    def scheme(self) -> str:
        return "http" if self.tls_certificate is None else "https"

    def tls(self) -> ssl.SSLContext | None:
        """TLS 1.2 or later as set; None without. Raises UsageError."""
        if self.tls_certificate is None:
            if self.tls_key is not None or self.tls_client_ca is not None:
                raise UsageError("telemetry: tls_key and tls_client_ca need tls_certificate")
            return None
        if self.tls_key is None:
            raise UsageError("telemetry: tls_certificate needs tls_key")
        _read_owned(self.tls_key, "tls_key", _KEY_BYTES)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            # A password, so that OpenSSL does not ask for one on the terminal.
            context.load_cert_chain(self.tls_certificate, self.tls_key, password="")
        except OSError as error:  # an SSLError is one
            raise UsageError(
                f"telemetry: expected a certificate in {self.tls_certificate} and its key, without "
                f"a password, in {self.tls_key}, both PEM: {error}"
            ) from error
        if self.tls_client_ca is not None:
            try:
                context.load_verify_locations(self.tls_client_ca)
            except OSError as error:
                raise UsageError(
                    f"telemetry: tls_client_ca: expected PEM certificates in "
                    f"{self.tls_client_ca}: {error}"
                ) from error
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def credentials(self) -> Credentials | None:
        """What clients must send; None where anybody may ask. Raises UsageError."""
        if self.basic_auth_file is not None and self.bearer_token_file is not None:
            raise UsageError("telemetry: basic_auth_file or bearer_token_file, got both")
        if self.basic_auth_file is not None:
            pair = _read_secret(self.basic_auth_file, "basic_auth_file")
            user, separator, password = pair.partition(b":")
            if not (user and separator and password):
                raise UsageError(
                    f"telemetry: basic_auth_file {self.basic_auth_file}: expected one line "
                    "USER:PASSWORD"
                )
            return Credentials("Basic", base64.b64encode(pair))
        if self.bearer_token_file is not None:
            return Credentials("Bearer", _read_secret(self.bearer_token_file, "bearer_token_file"))
        return None

    def cautions(self, listen_host: str) -> list[str]:
        """What the user should know of these settings on this address."""
        secret = self.basic_auth_file or self.bearer_token_file
        if secret is None or self.tls_certificate is not None or _is_loopback(listen_host):
            return []
        caution = (
            f"telemetry: the secret of {secret} crosses the network readable by all, as "
            f"{listen_host} is served without TLS; set tls_certificate and tls_key"
        )
        return [caution]


PLAIN = WebSettings()


class Credentials:
    """A secret that clients send with each request (RFC 7617, RFC 6750); kept as its digest."""

    def __init__(self, scheme: str, secret: bytes) -> None:
        self._scheme = scheme
        self._digest = hashlib.sha256(secret).digest()

    @property
    def challenge(self) -> str:
        """For the header WWW-Authenticate."""
        return f'{self._scheme} realm="paceline"'

    def allow(self, authorization: str) -> bool:
        """Whether a header Authorization has the secret; takes as long for any wrong one."""
        scheme, _, sent = authorization.partition(" ")
        # WSGI hands over bytes as Latin-1 (PEP 3333)
        digest = hashlib.sha256(sent.strip().encode("latin-1", "replace")).digest()
        same = hmac.compare_digest(digest, self._digest)
        return same and scheme.lower() == self._scheme.lower()


def guarded(application: WSGIApplication, credentials: Credentials | None) -> WSGIApplication:
    """`application` at /metrics alone, for those who may ask."""

    def guard(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        if credentials and not credentials.allow(environ.get("HTTP_AUTHORIZATION", "")):
            headers = [("WWW-Authenticate", credentials.challenge)]
            return _answer(start_response, "401 Unauthorized", headers)
        if environ.get("PATH_INFO") != METRICS_PATH:
            return _answer(start_response, "404 Not Found", [], f"metrics are at {METRICS_PATH}\n")
        return application(environ, start_response)

    return guard


def _answer(
    start_response: StartResponse, status: str, headers: list[tuple[str, str]], text: str = ""
) -> Iterable[bytes]:
    body = (text or f"{status}\n").encode()
    plain = [("Content-Type", "text/plain; charset=utf-8"), ("Content-Length", str(len(body)))]
    start_response(status, [*headers, *plain])
    return [body]


class WebServer(socketserver.ThreadingMixIn, WSGIServer):
    """A thread for each connection, each with one request; a few at once, and none for long."""

    daemon_threads = True
    block_on_close = False

    def __init__(
        self,
        application: WSGIApplication,
        listen_host: str,
        listen_port: int,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """Bind to the address (port 0: any free one). Raises OSError if it cannot be had."""
        found = socket.getaddrinfo(listen_host, listen_port, type=socket.SOCK_STREAM)[0]
        self.address_family = found[0]
        self._tls = tls
        self._free = threading.BoundedSemaphore(_CONNECTIONS)
        self._open: dict[socket.socket, float] = {}  # connections, and until when they may last
        super().__init__((listen_host, listen_port), _Handler)
        self.set_app(application)

    def server_bind(self) -> None:
        # Not HTTPServer's: it asks the name service for the host's full name, which may hang.
        socketserver.TCPServer.server_bind(self)
        self.server_name = str(self.server_address[0])
        self.server_port = self.server_address[1]
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Connections beyond the limit are closed at once."""
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no thread to be had
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def finish_request(self, request: Any, client_address: Any) -> None:
        """In the connection's thread, so that none waits for another's handshake."""
        request.settimeout(_WAIT_S)
        with self._limited(request):
            if self._tls is None:
                super().finish_request(request, client_address)
                return
            secured = self._tls.wrap_socket(
                request, server_side=True, do_handshake_on_connect=False
            )
            with secured, self._limited(secured):
                secured.do_handshake()
                super().finish_request(secured, client_address)

    def service_actions(self) -> None:
        """Break off what takes too long; called about twice a second."""
        now_s = time.monotonic()
        for connection, until_s in list(self._open.items()):
            if now_s >= until_s:
                with suppress(OSError):  # it has just ended
                    # not SSLSocket's, which would change what its thread is using
                    socket.socket.shutdown(connection, socket.SHUT_RDWR)

    def shutdown(self) -> None:
        """Stop serving at once, not only at the next look at what is open."""
        with suppress(OSError):  # systems that cannot; there it takes half a second
            self.socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits for connections
        super().shutdown()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away, or that TLS refuses, is no event of the sidecar's."""

    @contextmanager
    def _limited(self, connection: socket.socket) -> Iterator[None]:
        self._open[connection] = time.monotonic() + _CONNECTION_S
        try:
            yield
        finally:
            del self._open[connection]


class _Handler(WSGIRequestHandler):
    timeout = _WAIT_S

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """No line a scrape in the sidecar's log."""


def _read_secret(path: Path, what: str) -> bytes:
    """The one line of a file that is its owner's alone, without white space around it."""
    secret = _read_owned(path, what, _SECRET_BYTES)
    if b"\n" in secret:
        raise UsageError(f"telemetry: {what} {path}: expected one line, got several")
    return secret


def _read_owned(path: Path, what: str, limit_bytes: int) -> bytes:
    try:
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            content = file.read(limit_bytes + 1).strip()
    except OSError as error:
        raise UsageError(f"telemetry: {what}: expected a file that can be read: {error}") from error
    faults = []
    if found.st_mode & 0o077:
        faults.append(
            "expected a file that its owner alone may read (chmod 600), its mode is "
            f"{stat.S_IMODE(found.st_mode):04o}"
        )
    if not 0 < len(content) <= limit_bytes:
        faults.append(f"expected 1 to {limit_bytes} bytes, got {len(content)}")
    if faults:
        raise UsageError(f"telemetry: {what} {path}: {'; '.join(faults)}")
    return content


def _is_loopback(listen_host: str) -> bool:
    return listen_host in ("localhost", "::1") or listen_host.startswith("127.")
