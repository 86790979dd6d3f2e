"""Starting and stopping a sidecar from the run that it watches.

Whatever goes wrong here is a warning: a run without its trace is still a run.
"""

from __future__ import annotations

import dataclasses
import os
import socket
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import paceline
from paceline.errors import DataError, PacelineWarning
from paceline.records.files import read_json
from paceline.telemetry.procfs import ProcFs

if TYPE_CHECKING:
    from paceline.telemetry.options import SidecarOptions

_READY_LIMIT_S = 5.0
_POLL_S = 0.02


class SidecarHandle:
    """A sidecar that was started; `port` is that of its metrics, None if it serves none."""

    def __init__(self, process: subprocess.Popen[bytes], port: int | None) -> None:
        self._process = process
        self.pid = process.pid
        self.port = port

    def stop(self, timeout_s: float = 5.0) -> None:
        """Ask it for its last sample and wait; after `timeout_s` end it. May be called twice."""
        self._process.terminate()  # nothing happens if it has ended
        try:
            self._process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(timeout=timeout_s)


def start_sidecar(options: SidecarOptions, log: Path | None = None) -> SidecarHandle | None:
    """Start a sidecar as a process of its own session and wait until it samples, 5 s at most.

    Without them, `log` is `sidecar.log` and the state file `sidecar.json`, beside the trace.
    Raises nothing of its own: what fails is told as a PacelineWarning, and None comes back.
    """
    log = log or options.out.with_name("sidecar.log")
    state = options.state or options.out.with_name("sidecar.json")
    options = dataclasses.replace(options, state=state)
    try:
        process = _spawn(options, log)
    except OSError as error:
        _warn(f"could not start ({error})")
        return None
    return _when_ready(process, state, log)


def sidecar_is_alive(state: Path) -> bool:
    """Whether the sidecar that wrote `state` still runs on this host; False if there is no such
    file, if it is another host's, or if its process id went to another process."""
    try:
        document = read_json(state)
    except (DataError, OSError):
        return False
    pid = document.get("pid")
    if document.get("host") != socket.gethostname() or not isinstance(pid, int):
        return False
    try:
        stat = ProcFs().stat(pid)
    except OSError:
        return False
    return stat is not None and not stat.ended and stat.start_ticks == document.get("start_ticks")


def _spawn(options: SidecarOptions, log: Path) -> subprocess.Popen[bytes]:
    log.parent.mkdir(parents=True, exist_ok=True)
    # The caller may have found us in an archive or through sys.path; the child must, too.
    home = str(Path(paceline.__file__).resolve().parent.parent)
    search = os.pathsep.join(dict.fromkeys([home, *filter(None, sys.path)]))
    with log.open("ab") as stream:
        # -P: no module of the working directory can stand in for one of the library's.
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "paceline.telemetry.sidecar", *options.arguments()],
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": search},
        )


def _when_ready(process: subprocess.Popen[bytes], state: Path, log: Path) -> SidecarHandle | None:
    limit_monotonic_s = time.monotonic() + _READY_LIMIT_S
    while time.monotonic() < limit_monotonic_s:
        document = _state_of(process.pid, state)
        if document is not None:
            if error := document.get("endpoint_error"):
                _warn(f"serves no metrics ({error}); it samples all the same")
            return SidecarHandle(process, document.get("port"))
        if process.poll() is not None:
            _warn(f"ended with status {process.returncode}; its log is {log}")
            return None
        time.sleep(_POLL_S)
    _warn(f"was not ready after {_READY_LIMIT_S:.0f} s; its log is {log}")
    return SidecarHandle(process, None)


def _state_of(pid: int, state: Path) -> dict[str, Any] | None:
    """The state file's content once this very process has written it."""
    try:
        document = read_json(state)
    except (DataError, OSError):
        return None
    return document if document.get("pid") == pid else None


def _warn(what: str) -> None:
    warnings.warn(
        f"sidecar: {what}; this host's trace may be missing from the report",
        PacelineWarning,
        stacklevel=4,
    )
