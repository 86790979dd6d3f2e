"""Request to a sidecar, its handle in the process that asks, and the files for Prometheus.

A sidecar is started, and restarted once if it dies. A failure here is a warning: a run without its
trace is still a run.

https://prometheus.io/docs/prometheus/latest/configuration/configuration/#file_sd_config
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import ipaddress
import json
import os
import stat
import subprocess
import threading
import time
import warnings
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError, field_validator

from paceline.base.errors import DataError, PacelineError, PacelineWarning, UsageError
from paceline.base.host.programs import own_module
from paceline.collectives.host import Process, host_name
from paceline.measure.records.files import read_json, write_text
from paceline.measure.records.metrics import RUN_FACTS
from paceline.plan.spec.models import TelemetrySettings

EXPENSIVE_INTERVAL_S = 5.0
DEFAULT_MAX_LIFETIME_S = 7 * 24 * 3600.0
NO_METRICS = -1
_LONGEST_REQUEST_BYTES = 1 << 20  # thousands of process ids
# Below the ephemeral ports of Linux (32768 and above), which any client socket may occupy.
_FIRST_PORT, _PORTS = 20000, 12000


class SidecarRequest(BaseModel):
    """Everything that a sidecar needs to know; it travels as JSON."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    settings: TelemetrySettings = TelemetrySettings()  # [telemetry] of the spec
    run: str  # name of the run in metrics
    trace: Path
    pids: tuple[PositiveInt, ...] = ()  # roots of the process trees to watch; none: the host alone
    cores: tuple[int, ...] = ()  # that it may use; none: those of the process that starts it
    state: Path | None = None  # sidecar.json
    trial_root: Path | None = None  # directory with the ranks' files
    replicas: int = 1  # model replicas of the trial
    run_targets: Path | None = None  # the run directory's folder for service discovery
    facts: dict[str, str] = {}  # RUN_FACTS
    launched_unix_s: float = Field(default_factory=time.time)
    max_lifetime_s: float = Field(default=DEFAULT_MAX_LIFETIME_S, gt=0)
    restarts: int = 0

    @field_validator("facts")
    @classmethod
    def _are_known_facts(cls, facts: dict[str, str]) -> dict[str, str]:
        if wrong := [key for key in facts if key not in RUN_FACTS]:
            raise ValueError(f"facts: expected one of {', '.join(RUN_FACTS)}, got {wrong[0]!r}")
        return facts

    @property
    def serves_metrics(self) -> bool:
        return self.settings.listen_port != NO_METRICS

    def ports(self, host: str) -> tuple[int, ...]:
        """Return the ports to try, in order.

        Each trial has a sidecar of its own. Without a port in the settings, the first choice
        follows from the run directory and the host, so that Prometheus finds all trials of a run
        at one address, without state that trials would have to share.
        """
        if self.settings.listen_port > 0:
            return (self.settings.listen_port,)
        if self.run_targets is None:
            return (0,)
        digest = hashlib.sha256(f"{self.run_targets}\n{host}".encode()).digest()
        return (_FIRST_PORT + int.from_bytes(digest[:4], "big") % _PORTS, 0)


def read_request(stream: BinaryIO) -> SidecarRequest:
    """Read a request, one line of JSON. Raises UsageError if it is none, or too long."""
    line = stream.readline(_LONGEST_REQUEST_BYTES + 1)
    if len(line) > _LONGEST_REQUEST_BYTES:
        raise UsageError(
            f"request of a sidecar: expected one line of at most {_LONGEST_REQUEST_BYTES} bytes; "
            "let Paceline start the sidecar, or use `paceline sidecar`"
        )
    try:
        return SidecarRequest.model_validate_json(line)
    except ValidationError as error:
        raise UsageError(f"request of a sidecar: expected JSON of this version: {error}") from error


def target_files(request: SidecarRequest, host: str) -> list[Path]:
    """Return the files that announce a sidecar: in the run directory, and in the directory that a
    permanent Prometheus watches."""
    files = []
    if request.run_targets is not None:
        files.append(request.run_targets / f"{host}.json")
    if request.settings.targets_dir is not None:
        files.append(Path(request.settings.targets_dir) / f"paceline-{host}-{request.run}.json")
    return files


def target_text(address: str, scheme: str) -> str:
    """Return the content of such a file. The label `__scheme__` overrides the scheme of the scrape
    configuration. Prometheus scrapes a target once even if several files contain it."""
    group = {"targets": [address], "labels": {"__scheme__": scheme}}
    return json.dumps([group], indent=1) + "\n"


def write_targets(files: list[Path], text: str) -> None:
    """Write each file atomically. Raises OSError."""
    for file in files:
        write_text(file, text)


def remove_targets(files: list[Path], text: str | None = None) -> None:
    """Remove the files; with `text`, only those that still have this content. Raises OSError."""
    for file in files:
        try:
            if text is None or file.read_text(encoding="utf-8") == text:
                file.unlink(missing_ok=True)
        except FileNotFoundError:
            continue


def address_of(listen_host: str, port: int, host: str) -> str:
    """Return HOST:PORT at which a listener can be reached; `host`, the name of this host, replaces
    an address that means all interfaces."""
    try:
        address = ipaddress.ip_address(listen_host.partition("%")[0])
    except ValueError:
        return f"{listen_host}:{port}"  # a name
    if address.is_unspecified:
        return f"{host}:{port}"
    return f"[{listen_host}]:{port}" if address.version == 6 else f"{listen_host}:{port}"


# --- basic and bearer authentication for the metrics endpoint (RFC 7617, RFC 6750) ---------------

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


_SHORT = "this host's trace ends early, the reason is in its sidecar.log"


class SidecarHandle:
    """A sidecar process that belongs to this process.

    Its standard input is a pipe from here: it ends when `stop` closes the pipe, and also when this
    process dies. A second death of the sidecar is final.
    """

    def __init__(self, request: SidecarRequest) -> None:
        """Raises OSError if the process cannot be started."""
        self._request = request
        self._lock = threading.Lock()
        self._stopped = False
        self._process = _spawn(request)
        self._thread = threading.Thread(target=self._watch_over, name="sidecar", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        """Process id of the current sidecar process."""
        return self._process.pid

    def stop(self, timeout_s: float = 10.0) -> None:
        """Let the sidecar take a last sample and end; kill it after `timeout_s`. May be called
        twice."""
        with self._lock:
            if self._stopped:
                return
            self._stopped = True
            process = self._process
        _close_pipe(process)
        try:
            process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(timeout=timeout_s)
            _remove_targets(self._request)
            _warn(f"did not end within {timeout_s:g} s; this host's trace may be incomplete")
        self._thread.join(timeout=timeout_s)
        log = _log_of(self._request)
        with suppress(OSError):
            if log.stat().st_size == 0:
                log.unlink()
        self._warn_of_endpoint()

    def _watch_over(self) -> None:
        """Wait for the end of the sidecar; if it died, start it once more."""
        if self._process.wait() == 0:
            return
        with self._lock:
            if self._stopped:
                return
            _close_pipe(self._process)
            request = self._request.model_copy(update={"restarts": 1})
            try:
                self._process = _spawn(request)
            except OSError as error:
                _remove_targets(request)
                _warn(f"died and could not be started again ({error}); {_SHORT}")
                return
        if self._process.wait() != 0 and not self._stopped:
            _remove_targets(request)
            _warn(f"died twice; {_SHORT}")

    def _warn_of_endpoint(self) -> None:
        if self._request.state is None:
            return
        with suppress(DataError, OSError):
            state = read_json(self._request.state)
            error = state.get("endpoint_error")
            if error is not None:
                what = (
                    "served no metrics"
                    if state.get("port") is None
                    else "its address could not be announced to Prometheus"
                )
                _warn(f"{what}: {error}")


def start_sidecar(request: SidecarRequest) -> SidecarHandle | None:
    """Start a sidecar without waiting for its first sample. Problems become warnings."""
    try:
        if request.serves_metrics:
            expected_authorization(request.settings)
            if text := caution(request.settings):
                _warn(text)
    except PacelineError as error:
        _warn(f"serves no metrics: {error}")
    try:
        return SidecarHandle(request)
    except OSError as error:
        _warn(f"cannot be started ({error}); this host has no trace")
        return None


def sidecar_is_alive(state: Path) -> bool:
    """Return whether the sidecar that wrote `state` is still running on this host."""
    try:
        document = read_json(state)
        process = Process(document["pid"], document["start_ticks"], document["boot_id"])
    except (DataError, OSError, KeyError):
        return False
    if document.get("host") != host_name() or document.get("ended") is not None:
        return False
    return process.is_alive()


def _spawn(request: SidecarRequest) -> subprocess.Popen[bytes]:
    command, environment = own_module("paceline.measure.telemetry.sidecar")
    request.trace.parent.mkdir(parents=True, exist_ok=True)
    with _log_of(request).open("ab") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            start_new_session=True,  # Ctrl-C is for the caller
            env=environment,
        )
    assert process.stdin is not None
    try:
        process.stdin.write(request.model_dump_json().encode() + b"\n")
        process.stdin.flush()
    except BrokenPipeError:
        pass  # it died at once: the caller sees its exit status
    return process


def _close_pipe(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # it died before it read its request
        process.stdin.close()


def _log_of(request: SidecarRequest) -> Path:
    return request.trace.parent / "sidecar.log"


def _remove_targets(request: SidecarRequest) -> None:
    with suppress(OSError):
        remove_targets(target_files(request, host_name()))


def _warn(what: str) -> None:
    warnings.warn(f"sidecar: {what}", PacelineWarning, stacklevel=3)
