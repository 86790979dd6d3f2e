"""Files through which Prometheus finds sidecars.

https://prometheus.io/docs/prometheus/latest/configuration/configuration/#file_sd_config
"""

from __future__ import annotations

import ipaddress
import json
from pathlib import Path

from paceline.records.files import write_text
from paceline.telemetry.request import SidecarRequest


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
