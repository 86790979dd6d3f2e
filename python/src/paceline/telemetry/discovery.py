"""Prometheus's file-based service discovery: where a host's sidecar can be scraped.

https://prometheus.io/docs/prometheus/latest/configuration/configuration/#file_sd_config
"""

from __future__ import annotations

import ipaddress
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.records.files import write_text

if TYPE_CHECKING:
    from paceline.telemetry.runtime import SamplerState


@dataclass(frozen=True, slots=True)
class TargetFile:
    """One file with one target; while it is there, Prometheus scrapes the sidecar.

    The target has no labels of a run: sidecars that are found through several files are still
    scraped once, as Prometheus takes equal targets for one.
    """

    path: Path
    address: str  # HOST:PORT
    scheme: str = "http"

    @classmethod
    def in_run(cls, targets: Path, host: str, address: str, scheme: str = "http") -> TargetFile:
        """That of a host in a run directory (RunFiles.targets)."""
        return cls(targets / f"{host}.json", address, scheme)

    @classmethod
    def among_others(
        cls, directory: Path, host: str, run: str, address: str, scheme: str = "http"
    ) -> TargetFile:
        """That of a host and a run in a directory that all runs and hosts share."""
        return cls(directory / f"paceline-{host}-{run}.json", address, scheme)

    def write(self) -> None:
        """Replace the file atomically. Raises OSError."""
        write_text(self.path, self._text())

    def remove(self) -> None:
        """Remove the file, unless another sidecar has put its own there. Raises OSError."""
        try:
            is_ours = self.path.read_text(encoding="utf-8") == self._text()
        except FileNotFoundError:
            return
        if is_ours:
            self.path.unlink(missing_ok=True)

    def _text(self) -> str:
        # A scheme in a target's labels goes before that of the scrape configuration.
        group = {"targets": [self.address], "labels": {"__scheme__": self.scheme}}
        return json.dumps([group], indent=1) + "\n"


def targets_of(state: SamplerState, host: str) -> set[TargetFile]:
    """The files of a sampler on `host` that said so."""
    if state.listen is None or state.port is None:
        return set()
    address = address_of(state.listen, state.port, host)
    return {TargetFile(Path(path), address, state.scheme) for path in state.targets}


def address_of(listen_host: str, port: int, host: str) -> str:
    """HOST:PORT under which a listener can be reached; `host`, this host's name, stands for an
    address that means all interfaces."""
    try:
        address = ipaddress.ip_address(listen_host.partition("%")[0])
    except ValueError:
        return f"{listen_host}:{port}"  # a name
    if address.is_unspecified:
        return f"{host}:{port}"
    return f"[{listen_host}]:{port}" if address.version == 6 else f"{listen_host}:{port}"
