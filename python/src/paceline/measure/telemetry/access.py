"""Basic and bearer authentication for the metrics endpoint (RFC 7617, RFC 6750)."""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

from paceline.base.errors import UsageError
from paceline.plan.spec import TelemetrySettings

_MOST_BYTES = 1 << 16


def expected_authorization(settings: TelemetrySettings) -> tuple[str, bytes] | None:
    """Return the scheme and the secret that clients must send; None without authentication.

    Raises UsageError if a file with a secret or key is unreadable, or if others than its owner may
    read it.
    """
    if settings.tls_key is not None:
        _read_private(Path(settings.tls_key), "tls_key")
    if settings.basic_auth_file is not None:
        path = Path(settings.basic_auth_file)
        pair = _read_line(path, "basic_auth_file")
        user, _, password = pair.partition(b":")
        if not (user and password):
            raise UsageError(f"telemetry: basic_auth_file {path}: expected one line USER:PASSWORD")
        return "Basic", base64.b64encode(pair)
    if settings.bearer_token_file is not None:
        return "Bearer", _read_line(Path(settings.bearer_token_file), "bearer_token_file")
    return None


def guarded(application: WSGIApplication, scheme: str, secret: bytes) -> WSGIApplication:
    """Return `application` for clients that send the secret; others get status 401.

    Digests are compared in constant time, so that the response time reveals nothing.
    """
    digest = hashlib.sha256(secret).digest()

    def guard(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        sent_scheme, _, sent = environ.get("HTTP_AUTHORIZATION", "").partition(" ")
        sent_digest = hashlib.sha256(sent.strip().encode("latin-1", "replace")).digest()
        is_equal = hmac.compare_digest(sent_digest, digest)
        if is_equal and sent_scheme.lower() == scheme.lower():
            return application(environ, start_response)
        start_response(
            "401 Unauthorized",
            [
                ("WWW-Authenticate", f'{scheme} realm="paceline"'),
                ("Content-Type", "text/plain; charset=utf-8"),
            ],
        )
        return [b"401 Unauthorized\n"]

    return guard


def caution(settings: TelemetrySettings) -> str | None:
    """Return a warning if a secret would cross the network without encryption."""
    secret = settings.basic_auth_file or settings.bearer_token_file
    host = settings.listen_host
    is_loopback = host in ("localhost", "::1") or host.startswith("127.")
    if secret is None or settings.tls_certificate is not None or is_loopback:
        return None
    return (
        f"telemetry: the secret of {secret} crosses the network unencrypted, because {host} is "
        "served without TLS; set tls_certificate and tls_key"
    )


def _read_line(path: Path, what: str) -> bytes:
    content = _read_private(path, what)
    if b"\n" in content:
        raise UsageError(f"telemetry: {what} {path}: expected one line, got several")
    return content


def _read_private(path: Path, what: str) -> bytes:
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            content = file.read(_MOST_BYTES + 1).strip()
    except OSError as error:
        raise UsageError(f"telemetry: {what}: expected a readable file: {error}") from error
    if mode & 0o077:
        raise UsageError(
            f"telemetry: {what} {path}: expected a file that only its owner may read "
            f"(chmod 600), its mode is {mode:04o}"
        )
    if not 0 < len(content) <= _MOST_BYTES:
        raise UsageError(
            f"telemetry: {what} {path}: expected 1 to {_MOST_BYTES} bytes, got {len(content)}"
        )
    return content
