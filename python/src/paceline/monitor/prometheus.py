"""Prometheus for one run directory: its configuration, its process, when it is ready."""

from __future__ import annotations

import shutil
import socket
import time
import urllib.request
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Any

import yaml

from paceline.errors import EnvironmentLacks, TimedOut, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from importlib.resources.abc import Traversable
    from pathlib import Path

JOB = "paceline"
_READY_LIMIT_S = 60.0
_POLL_S = 0.1
_REQUEST_LIMIT_S = 10.0
# Prometheus deletes blocks that are older than this, relative to the newest block.
_RETENTION = "3650d"


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """Settings for scraping sidecars with TLS or authentication; their targets state the scheme."""

    bearer_token_file: Path | None = None
    basic_auth_file: Path | None = None  # a line USER:PASSWORD
    ca_file: Path | None = None

    def settings(self) -> dict[str, Any]:
        """Return a part of a scrape configuration. Raises UsageError if a file cannot be used."""
        found: dict[str, Any] = {}
        if self.bearer_token_file is not None:
            path = _existing(self.bearer_token_file, "--bearer-token-file")
            found["authorization"] = {"credentials_file": str(path)}
        if self.basic_auth_file is not None:
            path = _existing(self.basic_auth_file, "--basic-auth-file")
            try:
                text = path.read_text("utf-8")
            except (OSError, ValueError) as error:
                raise UsageError(
                    f"--basic-auth-file {path}: expected a readable file: {error}"
                ) from error
            user, colon, password = text.strip().partition(":")
            if not colon:
                raise UsageError(f"--basic-auth-file {path}: expected a line USER:PASSWORD")
            found["basic_auth"] = {"username": user, "password": password}
        if self.ca_file is not None:
            found["tls_config"] = {"ca_file": str(_existing(self.ca_file, "--ca-file"))}
        return found


@dataclass(frozen=True, slots=True)
class Address:
    """Address on which a server listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        return f"http://{self}"


def parse_address(text: str) -> Address:
    """Parse HOST:PORT; port 0 means any free port. Raises UsageError."""
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise UsageError(f"--listen {text!r}: expected HOST:PORT, such as 127.0.0.1:9090")
    return Address(host.removeprefix("[").removesuffix("]"), int(port))


def free_address(wanted: Address) -> Address:
    """Return `wanted` with a free port. Raises EnvironmentLacks if it is not free.

    The port is closed again for the program that will listen there. If another program takes it
    first, that program reports the error.
    """
    family = socket.AF_INET6 if ":" in wanted.host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((wanted.host, wanted.port))
            return Address(wanted.host, listener.getsockname()[1])
    except OSError as error:
        raise EnvironmentLacks(
            f"cannot listen on {wanted}: {error.strerror or error}; choose another address with "
            "--listen HOST:PORT (port 0: any free one)"
        ) from error


def find_program(name: str) -> str:
    """Return the path of a program. Raises EnvironmentLacks if it is not on PATH."""
    found = shutil.which(name)
    if found is None:
        raise EnvironmentLacks(
            f"{name}: not found on PATH; it comes with Prometheus (Debian: apt-get install "
            "prometheus; otherwise https://prometheus.io/download/). A live view without it: "
            "paceline watch RUN_DIR"
        )
    return found


def packaged(kind: str) -> dict[str, str]:
    """Return the rules or dashboards in the package, by file name."""
    folder: Traversable = resources.files("paceline.monitor") / "files" / kind
    return {
        entry.name: entry.read_text(encoding="utf-8")
        for entry in folder.iterdir()
        if entry.name.endswith((".yml", ".json"))
    }


def configuration(access: Access) -> str:
    """Return the text of a prometheus.yml for a folder of the run directory.

    Paths are relative, so that the name of the run directory may contain any character. `instance`
    and `job` are dropped from series, so that imported series and those of successive sidecars on
    a host continue each other. Raises UsageError.
    """
    scrape: Mapping[str, Any] = {
        "job_name": JOB,
        "file_sd_configs": [{"files": ["../targets/*.json"], "refresh_interval": "5s"}],
        "metric_relabel_configs": [{"action": "labeldrop", "regex": "instance|job"}],
        **access.settings(),
    }
    document = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "5s"},
        "rule_files": ["rules/*.yml"],
        "scrape_configs": [scrape],
    }
    return yaml.safe_dump(document, sort_keys=False)


def command(program: str, config: str, storage: str, listen: Address) -> list[str]:
    """Return the command that starts Prometheus."""
    return [
        program,
        f"--config.file={config}",
        f"--storage.tsdb.path={storage}",
        f"--storage.tsdb.retention.time={_RETENTION}",
        f"--web.listen-address={listen}",
        "--log.level=warn",
    ]


def wait_until_ready(
    listen: Address, still_runs: Callable[[], None], limit_s: float = _READY_LIMIT_S
) -> None:
    """Wait until Prometheus answers queries. `still_runs` raises if it has ended. Raises TimedOut
    after `limit_s`."""
    deadline = time.monotonic() + limit_s
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # never by a proxy
    while True:
        still_runs()
        try:
            with direct.open(f"{listen.url}/-/ready", timeout=_REQUEST_LIMIT_S):
                return
        except OSError:
            if time.monotonic() > deadline:
                raise TimedOut(
                    f"Prometheus at {listen.url} was not ready within {limit_s:.0f} s; look at "
                    "prometheus.log beside its configuration"
                ) from None
            time.sleep(_POLL_S)


def _existing(path: Path, option: str) -> Path:
    if not path.is_file():
        raise UsageError(f"{option} {path}: expected a file; there is none")
    return path.resolve()
