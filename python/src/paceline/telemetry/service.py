"""The sampler of a host: the one process that watches for all runs on it.

It runs as `python -m paceline.telemetry.service RUNTIME_DIR`, started by the first who wants
something watched, and ends when nothing is left to watch. Requests come and go as files; SIGHUP
says that they did. The traces are the record: without metrics it goes on sampling.
"""

from __future__ import annotations

import dataclasses
import gc
import logging
import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import PacelineError
from paceline.host.machine import host_name
from paceline.records.rows import HostSample
from paceline.telemetry.accounts import Figures
from paceline.telemetry.cadence import beats_between, next_beat
from paceline.telemetry.endpoint import Endpoint
from paceline.telemetry.host import HostReader
from paceline.telemetry.labels import RunLabels
from paceline.telemetry.process_ids import ProcessId
from paceline.telemetry.processes import ProcessTable
from paceline.telemetry.procfs import ProcFs
from paceline.telemetry.runtime import Runtime, SamplerState, put
from paceline.telemetry.seldom import Seldom
from paceline.telemetry.ticks import HostTick
from paceline.telemetry.watch import Served, Tick, Watch, WatchRefusedError
from paceline.telemetry.watches import (
    account_path,
    all_requests,
    forget_refusals,
    refuse,
    remove_request,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from paceline.telemetry.host import HostReading
    from paceline.telemetry.watch import EndReason
    from paceline.telemetry.watches import WatchRequest

_TOLD_TO_END = (signal.SIGTERM, signal.SIGINT)
_SIGNALS = (*_TOLD_TO_END, signal.SIGHUP)
_LOOK_EVERY_S = 1.0  # whether what is watched lives, and whether a SIGHUP was lost
_LOCK_LIMIT_S = 0.5
_DEEP_CPU_SHARE = 0.001  # of a core, for what is costly to read
# While a run is young: the peak of a short one's memory rests on these few readings.
_YOUNG_DEEP_CPU_SHARE = 0.003
_YOUNG_S = 15.0
_NOT_TO_BE_SEEN = -2
_log = logging.getLogger("paceline.sidecar")


class Sampler:
    """Watches for all requests in a runtime folder until none is left."""

    def __init__(self, runtime: Runtime, itself: ProcessId, host: str) -> None:
        self._runtime = runtime
        self._requests = str(runtime.watches)
        self._itself = itself
        self._host = host
        self._watches: dict[str, Watch] = {}
        self._notes: dict[str, str] = {}
        self._served: dict[str, Served] = {}
        self._seen_ns = -1
        source = ProcFs()
        self._table = ProcessTable(source, [itself.pid])
        self._figures = Figures(source)
        self._reader = HostReader(cgroup_pid=None)
        last = runtime.last_state()  # of one that did not end in order
        self._endpoint = Endpoint(host, last)
        self._labels = RunLabels(last.runs if last else {})
        self._samples = self._missed = 0
        self._last_tick_s: float | None = None
        self._latest: Tick | None = None
        self._own_rss = Seldom(self._read_own_rss)
        self._next_deep_s = self._next_look_s = self._young_until_s = float("-inf")

    def run(self) -> None:
        """Sample until no watch is left, or until SIGTERM or SIGINT.

        The signals are blocked meanwhile and waited for, so none falls between two instructions.
        """
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        try:
            forget_refusals(self._runtime)
            self._refresh()
            while self._watches:
                if self._wait():
                    self._end_all("asked")
                    break
                self._end_those_done()
                self._tick(self._due())
                self._refresh()
        finally:
            self._endpoint.close()
            self._runtime.sampler.unlink(missing_ok=True)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _wait(self) -> bool:
        """Wait for a beat, a request, or an end to notice; whether it was told to end."""
        now_s = time.monotonic()
        beat_s = min(watch.next_beat_s for watch in self._watches.values())
        # sigtimedwait takes no negative time
        told = signal.sigtimedwait(_SIGNALS, max(0.0, min(beat_s - now_s, _LOOK_EVERY_S)))
        if told is None:
            return False
        if told.si_signo == signal.SIGHUP:
            self._seen_ns = -1
        return told.si_signo in _TOLD_TO_END

    def _due(self) -> list[Watch]:
        now_s = time.monotonic()
        return [watch for watch in self._watches.values() if watch.next_beat_s <= now_s]

    def _refresh(self) -> None:
        """Take up new requests, end watches whose request is gone."""
        try:
            version_ns = os.stat(self._requests).st_mtime_ns  # noqa: PTH116  (at every tick)
            if version_ns == self._seen_ns:
                return
            requests = all_requests(self._runtime)
        except OSError as error:  # somebody tidied up; what is watched already goes on
            if self._seen_ns != _NOT_TO_BE_SEEN:
                _log.warning("no requests can be taken any more: %s", error)
            self._seen_ns = _NOT_TO_BE_SEEN
            return
        self._seen_ns = version_ns
        for watch in list(self._watches.values()):
            request = requests.get(watch.request.id)
            if request is None or request.key != watch.request.key:
                self._end(watch, "asked")
        fresh = [requests[name] for name in requests if name not in self._watches]
        begun = [new for request in fresh if (new := self._begin(request)) is not None]
        self._tick(begun)
        for new in begun:
            self._serve(new)
        self._publish()

    def _begin(self, request: WatchRequest) -> Watch | None:
        account = account_path(self._runtime, request.id)
        self._table.excluded.update(request.excluded)
        request = dataclasses.replace(request, run=self._labels.label_of(request))
        try:
            watch = Watch(request, account, self._table, self._figures, self._host)
        except (WatchRefusedError, PacelineError) as error:
            _log.warning("run %s is not watched: %s", request.run, error)
            refuse(self._runtime, request, str(error))
            return None
        self._watches[request.id] = watch
        self._next_deep_s = time.monotonic()
        self._young_until_s = self._next_deep_s + _YOUNG_S
        return watch

    def _serve(self, watch: Watch) -> None:
        request = watch.request
        served = self._served[request.id] = self._endpoint.serve(request)
        if note := self._endpoint.note(request):
            self._notes[request.key] = note
        if served.error is not None:
            self._notes[request.key] = (
                f"serves no metrics ({served.error}); it samples all the same"
            )
        watch.announce(served)
        if served.port is not None and watch.latest is not None:
            self._tell_scrapers()

    def _publish(self) -> None:
        """Tell Prometheus and those who wait for an answer how things stand."""
        requests = [watch.request for watch in self._watches.values()]
        self._labels.keep(requests)
        self._endpoint.tell_prometheus(requests)
        served = self._endpoint.served
        state = SamplerState(
            process=self._itself,
            listen=served.listen,
            port=served.port,
            scheme=served.scheme,
            watches=[request.key for request in requests],
            notes=self._notes,
            runs=self._labels.known,
            targets=self._endpoint.targets,
        )
        try:
            put(self._runtime.sampler, state)
        except OSError as error:
            _log.warning("nobody learns how things stand: %s", error)

    def _end_those_done(self) -> None:
        now_s = time.monotonic()
        if now_s < self._next_look_s:
            return
        self._next_look_s = now_s + _LOOK_EVERY_S * 0.9  # waits end a little early as often as late
        for watch in list(self._watches.values()):
            reason: EndReason | None = None
            if watch.lost:
                reason = "trace not writable"
            elif time.time() >= watch.request.ends_unix_s:
                reason = "lifetime reached"
            elif not watch.any_alive():
                reason = "watched processes ended"
            if reason is not None:
                self._end(watch, reason)

    def _end_all(self, reason: EndReason) -> None:
        for watch in list(self._watches.values()):
            self._end(watch, reason)
            remove_request(self._runtime, watch.request.id)
        self._publish()

    def _end(self, watch: Watch, reason: EndReason) -> None:
        """Take the last sample of a watch, and let it go; unless there was a descendant that was
        not known yet."""
        if not watch.lost:
            self._tick([watch], final=True)
        if reason == "watched processes ended" and watch.any_alive():
            return
        del self._watches[watch.request.id]
        watch.finish(self._served.pop(watch.request.id, Served()), reason)
        if reason != "asked":
            remove_request(self._runtime, watch.request.id)
        else:
            account_path(self._runtime, watch.request.id).unlink(missing_ok=True)
        self._notes.pop(watch.request.key, None)
        self._seen_ns = -1

    def _tick(self, due: list[Watch], *, final: bool = False) -> None:
        """One reading of the host and of all processes, for all watches that are due."""
        if not due:
            return
        monotonic_s, unix_s = time.monotonic(), time.time()
        deep = final or (
            monotonic_s >= self._next_deep_s and any(watch.wants_deep for watch in due)
        )
        try:
            reading = self._reader.read(deep)
            self._read_processes(due, monotonic_s)
        except OSError as error:
            _log.warning("a sample is missing: %s", error)
            for watch in due:
                watch.next_beat_s = next_beat(monotonic_s, watch.request.interval_s)
            return
        self._count(monotonic_s, final=final)
        tick = self._tick_of(unix_s, monotonic_s, reading)
        started_cpu_s = time.process_time()
        for watch in self._watches.values():
            if watch not in due:
                watch.pass_over(reading)
                continue
            try:
                watch.sample(
                    tick,
                    deep=final or (deep and watch.wants_deep),
                    final=final,
                )
            except OSError as error:  # that of one run is not the others'
                _log.warning("run %s: a sample is missing: %s", watch.request.run, error)
        if deep:
            cost_s = time.process_time() - started_cpu_s
            is_young = monotonic_s < self._young_until_s
            share = _YOUNG_DEEP_CPU_SHARE if is_young else _DEEP_CPU_SHARE
            self._next_deep_s = monotonic_s + cost_s / share
        self._latest = tick
        self._tell_scrapers()

    def _read_processes(self, due: Iterable[Watch], monotonic_s: float) -> None:
        self._figures.next_tick()
        asked = [watch for watch in due if watch.has_processes]
        for watch in asked:
            watch.look(monotonic_s)
        if asked:
            self._table.walk()

    def _count(self, monotonic_s: float, *, final: bool) -> None:
        self._samples += 1
        last_s = self._last_tick_s
        if final:
            return
        self._last_tick_s = monotonic_s
        if last_s is not None:
            self._missed += beats_between(last_s, monotonic_s, self._interval_s())

    def _interval_s(self) -> float:
        return min((watch.request.interval_s for watch in self._watches.values()), default=1.0)

    def _tick_of(self, unix_s: float, monotonic_s: float, reading: HostReading) -> Tick:
        return Tick(
            unix_s=unix_s,
            monotonic_s=monotonic_s,
            host=reading,
            sampler_cpu_s=time.process_time(),
            sampler_rss_bytes=self._own_rss.get(),
            missed=self._missed,
        )

    def _read_own_rss(self) -> int:
        stat = self._table.source.stat(self._itself.pid)
        return stat.rss_bytes if stat else 0

    def _tell_scrapers(self) -> None:
        if self._endpoint.served.port is None or self._latest is None:
            return
        watches = [watch for watch in self._watches.values() if not watch.request.keeps_only()]
        self._endpoint.update(
            HostTick(
                sample=host_sample(self._latest),
                watches=tuple(watch.latest for watch in watches if watch.latest is not None),
                interval_s=self._interval_s(),
                samples=self._samples,
                missed_samples=self._missed,
                restarts=max((watch.restarts for watch in watches), default=0),
            )
        )


def host_sample(tick: Tick) -> HostSample:
    """A tick as a row that says nothing of any run."""
    return HostSample(
        unix_s=tick.unix_s,
        **tick.host.fields(),
        run_processes=0,
        run_cpu_seconds=0.0,
        run_cpu_percent=None,
        run_rss_bytes=0,
        run_pss_bytes=None,
        run_threads=0,
        run_voluntary_context_switches=0,
        run_involuntary_context_switches=0,
        sidecar_cpu_seconds=tick.sampler_cpu_s,
        sidecar_rss_bytes=tick.sampler_rss_bytes,
        sidecar_missed_ticks=tick.missed,
    )


def main(argv: list[str] | None = None) -> int:
    """Be the sampler of this host, unless another is; returns 0."""
    (root,) = sys.argv[1:] if argv is None else argv
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    runtime = Runtime(Path(root))
    itself = ProcessId.of(os.getpid())
    lock = runtime.take_lock(_LOCK_LIMIT_S)
    if lock is None or itself is None:
        return 0
    _leave_the_ranks_core()
    sampler = Sampler(runtime, itself, host_name())
    gc.freeze()  # modules stay to the end: no need to look through them again and again
    sampler.run()
    os.close(lock)
    return 0


def _leave_the_ranks_core() -> None:
    """mpirun binds a rank, and so its children, to a core that training needs; take any."""
    try:
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    except OSError as error:
        _log.info("stays on the CPUs it was given: %s", error)


if __name__ == "__main__":
    sys.exit(main())
