"""The sidecar process: samples one host for one trial until the trial ends.

It runs as `python -m paceline.measure.telemetry.sidecar` with a `SidecarRequest` as one line of
JSON on standard input. It ends when standard input is closed, when its parent has ended, when all
watched processes have ended, on SIGTERM or SIGINT, or after its longest lifetime.
"""

from __future__ import annotations

import errno
import gc
import logging
import os
import select
import signal
import sys
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from paceline.base.errors import UsageError
from paceline.collectives.host import Process, host_name
from paceline.measure.records.files import fields_of, write_json, write_text
from paceline.measure.records.layout import HostFiles
from paceline.measure.records.metrics import HOST, METRICS, SIDECAR
from paceline.measure.records.rows import SCHEMA
from paceline.measure.telemetry.exporter import (
    LatestSnapshot,
    MetricsServer,
    Snapshot,
    text_of,
    with_gauges_of,
)
from paceline.measure.telemetry.request import (
    EXPENSIVE_INTERVAL_S,
    SidecarRequest,
    address_of,
    read_request,
    remove_targets,
    target_files,
    target_text,
    write_targets,
)
from paceline.measure.telemetry.sampler import Sampler

_LOOK_EVERY_S = 1.0  # for the end of the parent or of the watched processes
_TOO_MANY_FILES = (errno.EMFILE, errno.ENFILE)
_log = logging.getLogger("paceline.sidecar")


class Sidecar:
    """Samples at a fixed interval and serves the last sample."""

    def __init__(self, request: SidecarRequest, *, parent: int | None = None) -> None:
        """parent: process whose end also ends the sidecar. Raises UsageError if the trace cannot be
        written."""
        self._request, self._parent = request, parent
        self._host = host_name()
        try:
            self._sampler = Sampler(request, self._host)
        except OSError as error:
            raise UsageError(f"sidecar: {request.trace} cannot be written: {error}") from error
        self._latest = LatestSnapshot(METRICS)
        self._server: MetricsServer | None = None
        self._endpoint_error: str | None = None
        self._last_alive: Snapshot | None = None
        self._started_unix_s = time.time()
        self._missed = 0  # samples

    def any_alive(self) -> bool:
        """Return whether there is something to watch."""
        return self._sampler.any_alive()

    def close(self) -> None:
        """Close the trace. `run` does it, too."""
        self._sampler.close()

    def run(self, stdin: int | None = None) -> str:
        """Sample until the end, and return its reason.

        stdin: descriptor whose end of file ends the sidecar.
        """
        interval_s = self._request.settings.interval_s
        deadline_s = time.monotonic() + self._request.max_lifetime_s
        with _stop_signals() as signalled:
            self._tick()
            self._serve()
            next_s = time.monotonic() + interval_s
            look_s = time.monotonic()
            reason = self._reason_to_end(deadline_s)
            while reason is None:
                now_s = time.monotonic()
                wait_s = max(0.0, min(next_s, now_s + _LOOK_EVERY_S) - now_s)
                inputs = [signalled] if stdin is None else [signalled, stdin]
                if select.select(inputs, [], [], wait_s)[0]:
                    reason = "asked"
                    break
                now_s = time.monotonic()
                if now_s - look_s >= _LOOK_EVERY_S:
                    look_s = now_s
                    reason = self._reason_to_end(deadline_s)
                if reason is None and now_s >= next_s:
                    late = int((now_s - next_s) / interval_s)
                    self._missed += late
                    next_s += (late + 1) * interval_s
                    reason = self._tick()
            if reason != "trace not writable":
                reason = self._tick(final=True) or reason
        self._finish(reason)
        return reason

    def _tick(self, *, final: bool = False) -> str | None:
        """Take a sample; return a reason to end if the trace cannot be written any more."""
        try:
            snapshot = self._sampler.tick(missed=self._missed, final=final)
        except OSError as error:
            if error.errno in _TOO_MANY_FILES:  # of /proc; the trace is open
                self._missed += 1
                return None
            _log.error("%s: %s", self._request.trace, error)
            return "trace not writable"
        self._latest.update(snapshot)
        if snapshot.row["run_processes"]:
            self._last_alive = self._latest.snapshot
        return None

    def _reason_to_end(self, deadline_s: float) -> str | None:
        if self._parent is not None and os.getppid() != self._parent:
            return "parent ended"
        if not self._sampler.any_alive():
            return "watched processes ended"
        if time.monotonic() >= deadline_s:
            return "lifetime reached"
        return None

    def _serve(self) -> None:
        request = self._request
        if request.serves_metrics:
            try:
                ports = request.ports(self._host)
                self._server = MetricsServer(self._latest, request.settings, ports)
                write_targets(target_files(request, self._host), self._target)
            except (OSError, UsageError) as error:
                self._endpoint_error = str(error)
                _log.warning(
                    "metrics are not served or not announced; the trace is written: %s", error
                )
        self._write_state(None)

    @property
    def _target(self) -> str:
        assert self._server is not None
        address = address_of(self._request.settings.listen_host, self._server.port, self._host)
        return target_text(address, self._server.scheme)

    def _finish(self, reason: str) -> None:
        if self._server is not None:
            with suppress(OSError):  # the directory may be gone
                remove_targets(target_files(self._request, self._host), self._target)
            self._server.close()
        try:
            self._write_last_values()
        except OSError as error:
            _log.warning("the last values are not written: %s", error)
        self._write_state(reason)
        self._sampler.close()

    def _write_last_values(self) -> None:
        """Write the values of the run in Prometheus's text format, for runs that are shorter than
        a scrape interval. Values of the host are left out: node_exporter has them."""
        snapshot, request = self._latest.snapshot, self._request
        if snapshot is None:
            return
        if self._last_alive is not None:
            snapshot = with_gauges_of(self._last_alive, snapshot, METRICS)
        text = text_of([m for m in METRICS if m.scope not in (HOST, SIDECAR)], snapshot)
        write_text(HostFiles(request.trace.parent).final_metrics, text)
        if request.settings.textfile_dir is not None:
            name = f"paceline-{self._host}-{request.run}.prom"
            write_text(Path(request.settings.textfile_dir) / name, text)

    def _write_state(self, ended: str | None) -> None:
        if self._request.state is None:
            return
        server = self._server
        document = {
            "schema": SCHEMA,
            **fields_of(Process.current()),
            "host": self._host,
            "listen": self._request.settings.listen_host if server else None,
            "port": server.port if server else None,
            "scheme": server.scheme if server else None,
            "endpoint_error": self._endpoint_error,
            "interval_s": self._request.settings.interval_s,
            "expensive_interval_s": EXPENSIVE_INTERVAL_S,
            "started_unix_s": self._started_unix_s,
            "restarts": self._request.restarts,
            "ended_unix_s": time.time() if ended else None,
            "ended": ended,
        }
        try:
            write_json(self._request.state, document)
        except OSError as error:
            _log.warning("%s: %s", self._request.state, error)


def run_sidecar(request: SidecarRequest) -> None:
    """Run a sidecar in the foreground (`paceline sidecar`). Raises UsageError."""
    sidecar = Sidecar(request)
    if not sidecar.any_alive():
        sidecar.close()
        raise UsageError("sidecar: expected a running process to watch, found none")
    sidecar.run()


@contextmanager
def _stop_signals() -> Iterator[int]:
    """Yield a descriptor that becomes readable after SIGTERM or SIGINT."""
    reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    before = {
        number: signal.signal(number, lambda *_: None) for number in (signal.SIGTERM, signal.SIGINT)
    }
    wakeup = signal.set_wakeup_fd(writing)
    try:
        yield reading
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(reading)
        os.close(writing)


def main() -> int:
    """Run as a process of its own. Return 0 if the sidecar ended in order."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    parent = os.getppid()
    try:
        request = read_request(sys.stdin.buffer)
        _use_cores(request.cores)
        sidecar = Sidecar(request, parent=parent)
    except UsageError as error:
        _log.error("%s", error)
        return error.exit_code
    gc.freeze()  # modules stay to the end: the garbage collector need not look at them again
    sidecar.run(sys.stdin.fileno())
    return 0


def _use_cores(cores: Collection[int]) -> None:
    """Leave the core of a rank, to which mpirun binds a rank and its children."""
    with suppress(OSError):  # not allowed in some containers
        if cores:
            os.sched_setaffinity(0, cores)


if __name__ == "__main__":
    sys.exit(main())
