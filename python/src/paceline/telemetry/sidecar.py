"""A host's sidecar: samples on a fixed beat, appends rows to the trace, serves metrics, and ends
with what it watches.

It runs as a process of its own (`python -m paceline.telemetry.sidecar`, or `paceline sidecar`).
The trace is the record: without the metrics endpoint it goes on sampling, without the trace it
has nothing left to do and ends.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import signal
import socket
import sys
import time
from typing import TYPE_CHECKING, Any, Literal

from paceline.errors import PacelineError, UsageError
from paceline.records.cgroups import read_limits
from paceline.records.files import JsonlWriter, write_json
from paceline.records.rows import SCHEMA
from paceline.telemetry.handle import SidecarHandle, sidecar_is_alive, start_sidecar
from paceline.telemetry.options import SidecarOptions, add_arguments, options_from
from paceline.telemetry.procfs import ProcFs
from paceline.telemetry.sampler import HostSampler

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from paceline.telemetry.exporter import LatestSampleCollector, MetricsServer

__all__ = [
    "SidecarHandle",
    "SidecarOptions",
    "add_arguments",
    "main",
    "options_from",
    "run_sidecar",
    "sidecar_is_alive",
    "start_sidecar",
]

EndReason = Literal["asked", "watched processes ended", "lifetime reached", "trace not writable"]

_ASKED_TO_END = (signal.SIGTERM, signal.SIGINT)
_LIVENESS_CHECK_S = 1.0
_log = logging.getLogger("paceline.sidecar")


def run_sidecar(options: SidecarOptions) -> None:
    """Sample until SIGTERM or SIGINT, until all watched processes have ended, or until the
    lifetime is over; then take a last sample.

    The two signals are blocked in this thread meanwhile and waited for, so none falls between two
    instructions. Raises UsageError if none of the processes exists.
    """
    blocked_before = signal.pthread_sigmask(signal.SIG_BLOCK, _ASKED_TO_END)
    try:
        _Sidecar(options).run()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked_before)


class _Sidecar:
    def __init__(self, options: SidecarOptions) -> None:
        self._options = options
        self._host = socket.gethostname()
        self._started_unix_s = time.time()
        self._started_monotonic_s = time.monotonic()
        self._sampler = HostSampler(options.pids)
        if not self._sampler.any_alive():
            pids = ", ".join(map(str, options.pids))
            raise UsageError(f"sidecar: expected a running process to watch, found none of {pids}")
        self._collector: LatestSampleCollector | None = None
        self._server: MetricsServer | None = None
        self._endpoint_error: str | None = None

    def run(self) -> None:
        with _open_trace(self._options.out) as trace:
            self._start_endpoint()
            self._write_state(None)
            reason: EndReason
            try:
                self._append(trace, self._header())
                reason = self._sample_to_the_end(trace)
            except _TraceLostError as error:
                # What was written so far stays readable; a row after a torn one would not.
                _log.error("%s: %s: sampling ends", self._options.out, error)
                reason = "trace not writable"
            finally:
                if self._server is not None:
                    self._server.close()
        self._write_state(reason)

    def _sample_to_the_end(self, trace: JsonlWriter) -> EndReason:
        self._sample(trace)
        for wake_monotonic_s in beats(self._started_monotonic_s, self._options.interval_s):
            reason = self._wait(wake_monotonic_s)
            alive = self._sample(trace, final=reason is not None)
            if reason == "watched processes ended" and alive:
                continue  # a descendant that was not known yet
            if reason is not None:
                return reason
        raise AssertionError("beats never end")

    def _wait(self, until_monotonic_s: float) -> EndReason | None:
        """Wait for the next beat; a reason to end before it cuts the wait short."""
        lifetime_ends_s = self._started_monotonic_s + self._options.max_lifetime_s
        while True:
            now_s = time.monotonic()
            if now_s >= lifetime_ends_s:
                return "lifetime reached"
            if not self._sampler.any_alive():
                return "watched processes ended"
            wait_s = min(until_monotonic_s, lifetime_ends_s) - now_s
            # sigtimedwait takes no negative time.
            if signal.sigtimedwait(_ASKED_TO_END, max(0.0, min(wait_s, _LIVENESS_CHECK_S))):
                return "asked"
            if wait_s <= _LIVENESS_CHECK_S and time.monotonic() < lifetime_ends_s:
                return None

    def _sample(self, trace: JsonlWriter, *, final: bool = False) -> bool:
        """Write one row; whether a watched process was alive in it."""
        try:
            sample = self._sampler.sample(final=final)
        except OSError as error:
            _log.warning("a sample is missing: %s", error)
            return False
        self._append(trace, sample)
        if self._collector is not None:
            self._collector.update(sample, self._sampler.cpu_seconds)
        return sample.run_processes > 0

    def _append(self, trace: JsonlWriter, row: object) -> None:
        try:
            trace.write(row)
        except OSError as error:
            raise _TraceLostError(error) from error

    def _start_endpoint(self) -> None:
        host, port = self._options.listen_host, self._options.listen_port
        if port is None:
            return
        # Here, because without an endpoint the sidecar is 10 MB smaller.
        from paceline.telemetry.exporter import (  # noqa: PLC0415
            LatestSampleCollector,
            MetricsServer,
        )

        collector = LatestSampleCollector(self._host, os.cpu_count() or 1, self._options.info)
        try:
            self._server = MetricsServer(collector, host, port)
        except (OSError, OverflowError) as error:
            self._endpoint_error = f"{host}:{port}: {error}"
            _log.warning("no metrics endpoint at %s; sampling goes on", self._endpoint_error)
        else:
            self._collector = collector

    def _header(self) -> dict[str, Any]:
        limits = read_limits(self._options.pids[0])
        return {
            "schema": SCHEMA,
            "host": self._host,
            "cores": os.cpu_count(),
            "cgroup_cpu_limit": limits.cpus,
            "cgroup_memory_limit_bytes": limits.memory_bytes,
            "interval_s": self._options.interval_s,
            "started_unix_s": self._started_unix_s,
        }

    def _write_state(self, ended: EndReason | None) -> None:
        if self._options.state is None:
            return
        itself = ProcFs().stat(os.getpid())
        document = {
            "schema": SCHEMA,
            "pid": os.getpid(),
            "start_ticks": itself.start_ticks if itself else None,
            "host": self._host,
            "listen": self._options.listen_host if self._server else None,
            "port": self._server.port if self._server else None,
            "endpoint_error": self._endpoint_error,
            "interval_s": self._options.interval_s,
            "started_unix_s": self._started_unix_s,
            "ended_unix_s": time.time() if ended else None,
            "ended": ended,
        }
        try:
            write_json(self._options.state, document)
        except OSError as error:
            _log.warning("%s: %s: sampling goes on", self._options.state, error)


class _TraceLostError(Exception):
    """A row could not be written."""


def beats(started_s: float, interval_s: float) -> Iterator[float]:
    """Moments at whole multiples of the interval after `started_s`, on the monotonic clock; those
    that have passed meanwhile are left out, not made up for."""
    beat = 0
    while True:
        beat = max(beat + 1, math.floor((time.monotonic() - started_s) / interval_s) + 1)
        yield started_s + beat * interval_s


def _open_trace(path: Path) -> JsonlWriter:
    try:
        cut_unfinished_row(path)
        return JsonlWriter(path)
    except OSError as error:
        raise UsageError(f"sidecar: expected a file to write the trace to: {error}") from error


def cut_unfinished_row(path: Path) -> None:
    """Cut off what a killed sidecar left of its last row, so that ours does not stick to it."""
    if not path.exists():
        return
    with path.open("r+b") as file:
        end = position = file.seek(0, os.SEEK_END)
        while position > 0:
            start = max(0, position - 4096)
            file.seek(start)
            newline = file.read(position - start).rfind(b"\n")
            if newline >= 0:
                position = start + newline + 1
                break
            position = start
        if position < end:
            file.truncate(position)


def main(argv: list[str] | None = None) -> int:
    """Run a sidecar in this process; returns 0. Raises PacelineError."""
    parser = argparse.ArgumentParser(
        prog="paceline sidecar",
        description="Sample this host and the processes below --pid until they end.",
    )
    add_arguments(parser)
    options = options_from(parser.parse_args(argv))
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    _leave_the_ranks_core()
    run_sidecar(options)
    return 0


def _leave_the_ranks_core() -> None:
    """mpirun binds a rank, and so its children, to a core that training needs; take any."""
    try:
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    except OSError as error:
        _log.info("stays on the CPUs it was given: %s", error)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except PacelineError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(error.exit_code)
