"""Starts a sidecar and restarts it once if it dies.

A failure here is a warning: a run without its trace is still a run.
"""

from __future__ import annotations

import subprocess
import threading
import warnings
from contextlib import suppress
from pathlib import Path

from paceline.base.errors import DataError, PacelineError, PacelineWarning
from paceline.base.host.programs import own_module
from paceline.collectives.host import Process, host_name
from paceline.measure.records.files import read_json
from paceline.measure.telemetry.request import (
    SidecarRequest,
    caution,
    expected_authorization,
    remove_targets,
    target_files,
)

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
