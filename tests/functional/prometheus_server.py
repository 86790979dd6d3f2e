"""A Prometheus of the tests' own, that scrapes what files in a folder name."""

from __future__ import annotations

import json
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.functional.prometheus_api import Prometheus

LIMIT_S = 30.0
SCRAPE_INTERVAL = "200ms"

needs_prometheus = pytest.mark.needs("prometheus")


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
def prometheus(
    folder: Path, jobs: Mapping[str, tuple[Path, Mapping[str, object]]]
) -> Iterator[Prometheus]:
    """A port of its own, ended at the end. It hears of what is new, or gone, every 5 s only.

    jobs: by name, where the files lie that say what to scrape, and how it is scraped.
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


def active_targets(api: Prometheus, job: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = api.get("targets", state="active")["activeTargets"]
    return [target for target in found if target["labels"]["job"] == job]
