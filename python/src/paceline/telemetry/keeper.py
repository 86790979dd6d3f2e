"""Whoever wants something watched keeps an eye on the sampler: it is started where there is none,
and once more if it dies before the watch is over."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import paceline
from paceline.errors import EnvironmentLacks, PacelineError, PacelineWarning, UsageError
from paceline.host.machine import host_name
from paceline.telemetry.discovery import targets_of
from paceline.telemetry.process_ids import Peer, ProcessId
from paceline.telemetry.runtime import RUNTIME_VARIABLE, SamplerState
from paceline.telemetry.watches import (
    path_of,
    read_request,
    remove_request,
    take_refusal,
    write_request,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline.telemetry.runtime import Runtime
    from paceline.telemetry.watches import WatchRequest

_READY_LIMIT_S = 10.0
_POLL_S = 0.02
_LOOK_EVERY_S = 30.0
_REMIND_EVERY_S = 0.5
_LOG_BYTES = 1 << 20
_OVER = SamplerState(process=ProcessId(pid=0, start_ticks=0))  # no sampler has the watch any more

# Samplers that this process has started; they may outlive the watch that they were started for.
_children: list[subprocess.Popen[bytes]] = []


class Keeper:
    """One watch and the sampler that has it, from `start` to `stop`."""

    def __init__(self, runtime: Runtime, request: WatchRequest) -> None:
        self._runtime = runtime
        self.request = request
        self._child: subprocess.Popen[bytes] | None = None
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._stopped = False
        self._reminded_s = float("-inf")
        self._thread: threading.Thread | None = None
        self.ended = threading.Event()  # the watch is over, or the sampler was lost for good

    def start(self, limit_s: float = _READY_LIMIT_S) -> SamplerState:
        """Ask for the watch and wait until a sampler has it, or has had it; what that sampler says.

        Raises UsageError if the sampler refuses it or it is there already, EnvironmentLacks if
        no sampler is ready in time.
        """
        before = read_request(self._runtime, self.request.id)
        if before is not None and _is_wanted(before):
            os.close(self._wake)
            raise UsageError(f"sidecar: {before.trace} is being written already, for a watch that "
                             "has not ended; choose another file")  # fmt: skip
        try:
            remove_request(self._runtime, self.request.id)
            write_request(self._runtime, self.request)
            state = self._until_watched(limit_s)
        except BaseException:
            remove_request(self._runtime, self.request.id)
            os.close(self._wake)
            raise
        self._thread = threading.Thread(target=self._keep, name="sidecar-keeper", daemon=True)
        self._thread.start()
        return state

    def stop(self, limit_s: float = _READY_LIMIT_S) -> None:
        """End the watch, and wait until its last row is written. May be called twice.

        A sampler that does not answer in time is ended, as it is of no use to others either.
        """
        if self._stopped:
            return
        self._stopped = True
        os.eventfd_write(self._wake, 1)
        if self._thread is not None:
            self._thread.join(timeout=limit_s)
        path_of(self._runtime, self.request.id).unlink(missing_ok=True)
        state = self._runtime.state()
        if state is not None:
            with Peer(state.process) as sampler:
                self._until_let_go(sampler, limit_s)
        else:
            remove_request(self._runtime, self.request.id)
            remove_targets(self._runtime)
        _reap()
        self.ended.set()
        os.close(self._wake)

    def _until_let_go(self, sampler: Peer, limit_s: float) -> None:
        deadline_s = time.monotonic() + limit_s
        sampler.send(signal.SIGHUP)
        while not sampler.wait(_POLL_S):
            state = self._runtime.last_state()
            if state is not None and state.watches and self.request.key not in state.watches:
                return  # it goes on for others
            if time.monotonic() > deadline_s:
                sampler.send(signal.SIGKILL)
                sampler.wait(limit_s)
                return

    def _keep(self) -> None:
        """Wait for the sampler's death; the first time, see to it that there is another."""
        is_second = False
        while not self._stopped:
            state = self._runtime.state()
            if state is not None and self.request.key in state.watches:
                with Peer(state.process) as sampler:
                    sampler.wait(_LOOK_EVERY_S, self._wake)
                continue
            if not path_of(self._runtime, self.request.id).exists():
                break  # the watch has ended
            if is_second:
                remove_targets(self._runtime)
                _warn("has died again and stays away")
                break
            is_second = True
            try:
                self._until_watched(_READY_LIMIT_S)
            except (PacelineError, OSError) as error:
                remove_targets(self._runtime)
                _warn(f"has died and did not come back ({error})")
                break
        self.ended.set()

    def _until_watched(self, limit_s: float) -> SamplerState:
        deadline_s = time.monotonic() + limit_s
        self._child = None
        with self._starter() as may_start:
            while True:
                state = self._answer()
                if state is not None:
                    return state
                if may_start() and not self._runtime.is_locked():
                    self._start_sampler()
                if time.monotonic() > deadline_s:
                    raise EnvironmentLacks(
                        f"sidecar: expected the sampler to be ready within {limit_s:g} s, it was "
                        f"not; its log is {self._runtime.log}"
                    )
                time.sleep(_POLL_S)

    def _answer(self) -> SamplerState | None:
        if reason := take_refusal(self._runtime, self.request):
            raise UsageError(f"sidecar: {reason}")
        state = self._runtime.state()
        if state is not None and self.request.key in state.watches:
            return state
        if not path_of(self._runtime, self.request.id).exists():
            return _OVER  # a short watch may begin and end between two looks
        if state is None:
            return None
        now_s = time.monotonic()
        if now_s - self._reminded_s > _REMIND_EVERY_S:
            self._reminded_s = now_s
            with Peer(state.process) as sampler:
                sampler.send(signal.SIGHUP)
        return None

    def _start_sampler(self) -> None:
        """Unless the last one we started is about to be ready."""
        if self._child is not None and self._child.poll() is None:
            return
        if self._child is not None and self._child.returncode != 0:
            raise EnvironmentLacks(
                f"sidecar: the sampler ended with status {self._child.returncode}; its log is "
                f"{self._runtime.log}"
            )
        _reap()
        self._child = _spawn(self._runtime)
        _children.append(self._child)

    @contextmanager
    def _starter(self) -> Iterator[_Turn]:
        """Of all who wait for a sampler, on this host one alone starts it."""
        turn = _Turn(self._runtime.root / "starter")
        try:
            yield turn
        finally:
            turn.close()


class _Turn:
    """Whether it is our turn to start a sampler; kept until `close`."""

    def __init__(self, path: Path) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._descriptor = os.open(path, flags, 0o600)
        self._is_ours = False

    def __call__(self) -> bool:
        if not self._is_ours:
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._is_ours = True
            except BlockingIOError:
                return False
        return True

    def close(self) -> None:
        os.close(self._descriptor)


def remove_targets(runtime: Runtime) -> None:
    """Where no sampler lives, remove what leads Prometheus to the one that died.

    Under the lock of samplers: one that starts meanwhile waits, and writes its own files after.
    """
    lock = runtime.take_lock()
    if lock is None:
        return
    try:
        last = runtime.last_state()
        for target in targets_of(last, host_name()) if last is not None else ():
            with suppress(OSError):  # gone with its run, or not to be written any more
                target.remove()
    finally:
        os.close(lock)


def _reap() -> None:
    """So that no zombie is left of samplers that we started and that have ended."""
    _children[:] = [child for child in _children if child.poll() is None]


def _is_wanted(request: WatchRequest) -> bool:
    """Whether a request that was found is still of use to somebody."""
    if not request.is_of_this_boot() or time.time() >= request.ends_unix_s:
        return False
    if request.owner is not None and not request.owner.is_alive():
        return False
    return not request.processes or any(process.is_alive() for process in request.processes)


def _spawn(runtime: Runtime) -> subprocess.Popen[bytes]:
    # The caller may have found us in an archive or through sys.path; the child must, too.
    home = str(Path(paceline.__file__).resolve().parent.parent)
    search = dict.fromkeys([home, *(str(Path(entry).absolute()) for entry in sys.path if entry)])
    # Nothing of a trial: its supervisor ends whatever has its marks.
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("PACELINE_") or name == RUNTIME_VARIABLE
    }
    too_long = runtime.log.exists() and runtime.log.stat().st_size > _LOG_BYTES
    with runtime.log.open("wb" if too_long else "ab") as stream:
        # -P: no module of the working directory can stand in for one of the library's.
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "paceline.telemetry.service", str(runtime.root)],
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            start_new_session=True,
            cwd="/",
            env={**kept, "PYTHONPATH": os.pathsep.join(search)},
        )


def _warn(what: str) -> None:
    warnings.warn(f"sidecar: {what}; this host's trace ends early", PacelineWarning, stacklevel=2)
