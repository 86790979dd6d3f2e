"""Run a Prometheus that scrapes the targets in the files of a folder."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.functional.prometheus_api import Prometheus
from tests.support.commands import start_command
from tests.support.listeners import free_address

from paceline.base.host.processes import end_processes

LIMIT_S = 30.0
SCRAPE_INTERVAL = "200ms"
_ATTEMPTS = 3


@contextmanager
def prometheus(folder: Path, jobs: Mapping[str, Path]) -> Iterator[Prometheus]:
    """Run a Prometheus on a free port. It notices new and removed targets every 5 s.

    jobs: folder with the target files, by name.
    """
    described = [
        {
            "job_name": name,
            "file_sd_configs": [{"files": [f"{targets}/*.json"], "refresh_interval": "1s"}],
        }
        for name, targets in jobs.items()
    ]
    timing = {"scrape_interval": SCRAPE_INTERVAL, "scrape_timeout": SCRAPE_INTERVAL}
    config = folder / "prometheus.yml"
    # JSON is YAML.
    config.write_text(json.dumps({"global": timing, "scrape_configs": described}))
    log = folder / "prometheus.log"
    for _ in range(_ATTEMPTS):
        address = free_address()
        command = ["prometheus", f"--config.file={config}", f"--web.listen-address={address}"]
        process = start_command([*command, f"--storage.tsdb.path={folder}/storage"], log)
        api = Prometheus(f"http://{address}")
        if _is_ready(process, api):
            break  # otherwise another program took the port first
    else:
        raise AssertionError(log.read_text())
    try:
        yield api
    finally:
        end_processes([process], 10)


def _is_ready(process: subprocess.Popen[bytes], api: Prometheus) -> bool:
    """Wait until Prometheus answers; False if it has ended."""
    limit_s = time.monotonic() + LIMIT_S
    while process.poll() is None and not api.is_ready():
        assert time.monotonic() < limit_s, f"Prometheus does not answer within {LIMIT_S:.0f} s"
        time.sleep(0.05)
    return process.poll() is None


def active_targets(api: Prometheus, job: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = api.get("targets", state="active")["activeTargets"]
    return [target for target in found if target["labels"]["job"] == job]
