"""Run a Prometheus that scrapes the targets in the files of a folder."""

from __future__ import annotations

import json
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.functional.prometheus_api import Prometheus

LIMIT_S = 30.0
SCRAPE_INTERVAL = "200ms"
_ATTEMPTS = 3

needs_prometheus = pytest.mark.needs("prometheus")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


@contextmanager
def prometheus(
    folder: Path, jobs: Mapping[str, tuple[Path, Mapping[str, object]]]
) -> Iterator[Prometheus]:
    """Run a Prometheus on a free port. It notices new and removed targets every 5 s.

    jobs: folder with the target files and settings of the scrape, by name.
    """
    found_by = {"refresh_interval": "1s"}
    described = [
        {
            "job_name": name,
            "file_sd_configs": [{"files": [f"{targets}/*.json"], **found_by}],
            **scrape,
        }
        for name, (targets, scrape) in jobs.items()
    ]
    timing = {"scrape_interval": SCRAPE_INTERVAL, "scrape_timeout": SCRAPE_INTERVAL}
    config = folder / "prometheus.yml"
    # JSON is YAML.
    config.write_text(json.dumps({"global": timing, "scrape_configs": described}))
    log = folder / "prometheus.log"
    for _ in range(_ATTEMPTS):
        port = free_port()
        process = _start(config, folder / "storage", port, log)
        if _is_ready(process, port):
            break  # otherwise another program took the port first
    else:
        raise AssertionError(log.read_text())
    try:
        yield Prometheus(f"http://127.0.0.1:{port}")
    finally:
        process.terminate()
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(timeout=10)


def _start(config: Path, storage: Path, port: int, log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as stream:
        return subprocess.Popen(
            [
                "prometheus",
                f"--config.file={config}",
                f"--storage.tsdb.path={storage}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
        )


def _is_ready(process: subprocess.Popen[bytes], port: int) -> bool:
    """Wait until Prometheus answers; False if it has ended."""
    limit_s = time.monotonic() + LIMIT_S
    while process.poll() is None:
        assert time.monotonic() < limit_s, f"Prometheus does not answer within {LIMIT_S:.0f} s"
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/-/ready", timeout=LIMIT_S):
                return True
        except OSError:  # not listening yet, or still reading its storage
            time.sleep(0.05)
    return False


def active_targets(api: Prometheus, job: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = api.get("targets", state="active")["activeTargets"]
    return [target for target in found if target["labels"]["job"] == job]
