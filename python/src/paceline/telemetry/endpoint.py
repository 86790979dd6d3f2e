"""Where a sampler serves metrics: one address for all watches, and the files that tell of it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import UsageError
from paceline.telemetry.discovery import TargetFile, address_of, targets_of
from paceline.telemetry.watch import Served
from paceline.telemetry.web import WebSettings

if TYPE_CHECKING:
    from collections.abc import Iterable

    from paceline.telemetry.exporter import LatestTick, MetricsServer
    from paceline.telemetry.runtime import SamplerState
    from paceline.telemetry.ticks import HostTick
    from paceline.telemetry.watches import WatchRequest

_log = logging.getLogger("paceline.sidecar")


class Endpoint:
    """Starts with the first watch that wants metrics; its settings hold until the sampler ends.

    last: what a sampler said that died; those who scrape know its port, and its files are there.
    """

    def __init__(self, host: str, last: SamplerState | None = None) -> None:
        self._host = host
        self._last_port = last.port if last else None
        self._left_behind = targets_of(last, host) if last else set()
        self._by: WatchRequest | None = None
        self._server: MetricsServer | None = None
        self._latest: LatestTick | None = None
        self._targets: set[TargetFile] = set()

    @property
    def served(self) -> Served:
        """What is served now."""
        if self._server is None or self._by is None:
            return Served()
        return Served(
            listen=self._by.listen_host, port=self._server.port, scheme=self._server.scheme
        )

    def update(self, tick: HostTick) -> None:
        """Take over a tick for those who scrape."""
        if self._latest is not None:
            self._latest.update(tick)

    def serve(self, request: WatchRequest) -> Served:
        """What a watch gets to hear; the server is started if it wants one and there is none."""
        if request.listen_port is None:
            return self.served
        if self._server is None:
            return self._start(request)
        return self.served

    def note(self, request: WatchRequest) -> str | None:
        """What a watch should know of settings that are not its own."""
        if request.listen_port is None or self._server is None or self._by is None:
            return None
        notes = web_of(request).cautions(request.listen_host)
        wanted = (request.listen_host, web_of(request))
        is_port = request.listen_port in (0, self._server.port)
        if wanted != (self._by.listen_host, web_of(self._by)) or not is_port:
            notes.append(
                f"metrics of this host are served already at {self._by.listen_host}:"
                f"{self._server.port}, as run {self._by.run} asked; other settings hold once no "
                "run is left there"
            )
        return "; ".join(notes) or None

    @property
    def targets(self) -> list[str]:
        """The files that tell of it now."""
        return sorted(str(target.path) for target in self._targets)

    def tell_prometheus(self, requests: Iterable[WatchRequest]) -> None:
        """Have a target file for every watch that asks for one, and no other."""
        wanted = {target for request in requests for target in self._targets_of(request)}
        old, self._left_behind = self._targets | self._left_behind, set()
        for target in old - wanted:
            try:
                target.remove()
            except OSError as error:
                _log.warning("%s: %s: Prometheus may look for us in vain", target.path, error)
        for target in wanted - self._targets:
            try:
                target.write()
            except OSError as error:
                _log.warning("%s: %s: Prometheus does not find us", target.path, error)
        self._targets = wanted

    def close(self) -> None:
        """Serve no longer."""
        self.tell_prometheus(())
        if self._server is not None:
            self._server.close()
            self._server = None

    def _start(self, request: WatchRequest) -> Served:
        # Here, because without an endpoint the sampler is 10 MB smaller.
        from paceline.telemetry.exporter import LatestTick, MetricsServer  # noqa: PLC0415

        latest = LatestTick(self._host)
        error: Exception | None = None
        for port in self._ports(request):
            try:
                server = MetricsServer(latest, request.listen_host, port, web_of(request))
            except (OSError, OverflowError, UsageError) as caught:
                error = caught
            else:
                self._server, self._latest, self._by = server, latest, request
                return self.served
        told = f"{request.listen_host}:{request.listen_port}: {error}"
        _log.warning("no metrics endpoint at %s; sampling goes on", told)
        return Served(error=told)

    def _ports(self, request: WatchRequest) -> list[int]:
        wanted = request.listen_port or 0
        last, self._last_port = self._last_port, None
        return [wanted] if wanted or last is None else [last, wanted]

    def _targets_of(self, request: WatchRequest) -> list[TargetFile]:
        served = self.served
        if served.port is None or served.listen is None or request.listen_port is None:
            return []
        address, scheme = address_of(served.listen, served.port, self._host), served.scheme
        targets = [
            TargetFile.among_others(Path(folder), self._host, request.run, address, scheme)
            for folder in request.other_targets
        ]
        if request.run_targets is not None:
            folder = Path(request.run_targets)
            targets.append(TargetFile.in_run(folder, self._host, address, scheme))
        return targets


def web_of(request: WatchRequest) -> WebSettings:
    """How the watch wants its metrics served."""

    def path(text: str | None) -> Path | None:
        return None if text is None else Path(text)

    return WebSettings(
        tls_certificate=path(request.tls_certificate),
        tls_key=path(request.tls_key),
        tls_client_ca=path(request.tls_client_ca),
        basic_auth_file=path(request.basic_auth_file),
        bearer_token_file=path(request.bearer_token_file),
    )
