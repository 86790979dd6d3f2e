"""`paceline monitor`: serve one run directory with Prometheus, and with Grafana if it is installed.

Prometheus's storage is only a view, built again each time; the files of the run are the record.
All files of the session are in the run directory's folder `monitor`.
"""

from __future__ import annotations

import shutil
import signal
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from paceline.errors import EnvironmentLacks, UsageError
from paceline.host.locks import try_lock
from paceline.monitor import grafana, prometheus
from paceline.monitor.backfill import import_blocks, write_openmetrics
from paceline.monitor.children import running
from paceline.monitor.prometheus import Access, Address
from paceline.records.files import write_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

    from paceline.monitor.children import Child
    from paceline.records.layout import RunFiles

_LOOK_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitorSettings:
    """Settings of a session. grafana_listen None: do not start Grafana."""

    listen: Address = field(default_factory=lambda: Address("127.0.0.1", 9090))
    grafana_listen: Address | None = field(default_factory=lambda: Address("127.0.0.1", 3000))
    backfill: bool = True
    access: Access = field(default_factory=Access)


def monitor(run: RunFiles, settings: MonitorSettings, say: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM, then end all child processes.

    Raises UsageError where the run directory is none or has its monitor already,
    EnvironmentLacks where Prometheus is missing, cannot listen or ends by itself, TimedOut.
    """
    _check(run)
    programs = {n: prometheus.find_program(n) for n in ("prometheus", "promtool")}
    with ExitStack() as stack:
        stack.enter_context(_signals_as_interrupts())
        try:
            stack.enter_context(_alone(run))
            listen = prometheus.free_address(settings.listen)
            _prepare(run, settings.access)
        except OSError as error:
            raise EnvironmentLacks(
                f"{run.monitor}: expected a folder that can be written: {error.strerror or error}"
            ) from error
        if settings.backfill:
            _import(run, programs["promtool"], say)
        argv = prometheus.command(programs["prometheus"], "prometheus.yml", "data", listen)
        children = [stack.enter_context(running("Prometheus", argv, run.monitor, {}))]
        prometheus.wait_until_ready(listen, children[0].check)
        say(f"Prometheus: {listen.url}")
        children += _start_grafana(run, settings, listen, stack, say)
        say("stop with Ctrl-C")
        try:
            while True:
                for child in children:
                    child.check()
                time.sleep(_LOOK_S)
        except KeyboardInterrupt:
            return


def _check(run: RunFiles) -> None:
    if not run.manifest.exists() and not (run.root / "trials").is_dir():
        raise UsageError(
            f"{run.root}: expected a run directory, with manifest.json or trials/; found "
            f"{'neither in it' if run.root.is_dir() else 'no such directory'}"
        )


@contextmanager
def _signals_as_interrupts() -> Iterator[None]:
    """Raise KeyboardInterrupt for SIGTERM too; ignore both signals during the clean-up."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = {n: signal.signal(n, interrupt) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _alone(run: RunFiles) -> Iterator[None]:
    """Lock the monitor folder of the run directory: two monitors cannot share the storage."""
    run.monitor.mkdir(mode=0o700, exist_ok=True)
    with (run.monitor / "lock").open("a") as lock:
        if not try_lock(lock):
            raise UsageError(
                f"{run.root}: another `paceline monitor` is running; end it first, or use the "
                "address that it printed"
            )
        yield


def _prepare(run: RunFiles, access: Access) -> None:
    """Delete the files of an earlier session, and write the configuration."""
    for name in ("data", "rules", "grafana"):
        shutil.rmtree(run.monitor / name, ignore_errors=True)
    for name, text in prometheus.packaged("rules").items():
        write_text(run.monitor / "rules" / name, text)
    config = run.monitor / "prometheus.yml"
    write_text(config, prometheus.configuration(access))
    config.chmod(0o600)  # it may contain a password
    run.targets.mkdir(exist_ok=True)
    (run.monitor / "data").mkdir()


def _import(run: RunFiles, promtool: str, say: Callable[[str], None]) -> None:
    text = run.monitor / "backfill.om"
    try:
        found = write_openmetrics(run, text)
        for trial in found.left_out:
            say(f"left out: {trial}")
        if found.samples:
            import_blocks(promtool, text, run.monitor / "data")
        say(f"imported {found.trials} trials, {found.samples} samples")
    finally:
        text.unlink(missing_ok=True)


def _start_grafana(
    run: RunFiles,
    settings: MonitorSettings,
    prometheus_address: Address,
    stack: ExitStack,
    say: Callable[[str], None],
) -> list[Child]:
    if settings.grafana_listen is None:
        return []
    server = grafana.find_grafana()
    if server is None:
        say("Grafana: not installed; its dashboards are in the package and in monitoring/grafana")
        return []
    listen = prometheus.free_address(settings.grafana_listen)
    folder = (run.monitor / "grafana").resolve()
    grafana.write_provisioning(folder, prometheus_address.url)
    child = stack.enter_context(
        running(
            "Grafana", grafana.command(server), run.monitor, grafana.environment(folder, listen)
        )
    )
    say(f"Grafana: {listen.url}/d/{grafana.HOME} (after some seconds)")
    return [child]
