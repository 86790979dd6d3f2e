"""A Prometheus of the tests' own, that scrapes what files in a folder name."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.functional.prometheus_api import Prometheus

LIMIT_S = 30.0
SCRAPE_INTERVAL = "200ms"

needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="prometheus is not installed"
)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def wait_for(what: str, holds: Callable[[], bool]) -> None:
    limit_s = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < limit_s, f"not within {LIMIT_S:.0f} s: {what}"
        time.sleep(0.05)


@contextmanager
def prometheus(folder: Path, targets: Path, **scrape: object) -> Iterator[Prometheus]:
    """One that scrapes what the files in `targets` name; a port of its own, ended at the end."""
    job = {
        "job_name": "paceline",
        "file_sd_configs": [{"files": [f"{targets}/*.json"], "refresh_interval": "1s"}],
        **scrape,
    }
    timing = {"scrape_interval": SCRAPE_INTERVAL, "scrape_timeout": SCRAPE_INTERVAL}
    config = folder / "prometheus.yml"
    # JSON is YAML.
    config.write_text(json.dumps({"global": timing, "scrape_configs": [job]}))
    port = free_port()
    log = folder / "prometheus.log"
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={config}",
                f"--storage.tsdb.path={folder / 'storage'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
        )
    try:
        url = f"http://127.0.0.1:{port}"

        def is_ready() -> bool:
            assert process.poll() is None, log.read_text()
            try:
                with urllib.request.urlopen(f"{url}/-/ready", timeout=LIMIT_S):
                    return True
            except OSError:  # not listening yet, or still reading its storage
                return False

        wait_for("prometheus answers", is_ready)
        yield Prometheus(url)
    finally:
        process.terminate()
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(timeout=10)


def active_targets(api: Prometheus) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = api.get("targets", state="active")["activeTargets"]
    return found
