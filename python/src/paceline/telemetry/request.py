"""Request to a sidecar, and the command line of `paceline sidecar`."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from paceline.errors import UsageError
from paceline.spec import TelemetrySettings
from paceline.telemetry.metrics import RUN_FACTS

if TYPE_CHECKING:
    import argparse

EXPENSIVE_INTERVAL_S = 5.0
DEFAULT_MAX_LIFETIME_S = 7 * 24 * 3600.0
_NO_METRICS = -1
_LONGEST_REQUEST_BYTES = 1 << 20  # thousands of process ids
# Below the ephemeral ports of Linux (32768 and above), which any client socket may occupy.
_FIRST_PORT, _PORTS = 20000, 12000
# Options of `paceline sidecar` that are settings of [telemetry] under the same name.
_SETTINGS = {
    "tls_certificate": "PEM; serve metrics over HTTPS only",
    "tls_key": "PEM; private key of the certificate",
    "tls_client_ca": "PEM; require a client certificate of this authority",
    "basic_auth_file": "file with one line USER:PASSWORD, required from clients",
    "bearer_token_file": "file with a token, required from clients",
    "targets_dir": "directory in which Prometheus looks for sidecars (file_sd_configs)",
    "textfile_dir": "directory in which node_exporter looks for metrics",
}


class SidecarRequest(BaseModel):
    """Everything that a sidecar needs to know; it travels as JSON."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    settings: TelemetrySettings = TelemetrySettings()  # [telemetry] of the spec
    run: str  # name of the run in metrics
    trace: Path
    pids: tuple[int, ...] = ()  # roots of the process trees to watch; none: the host alone
    state: Path | None = None  # sidecar.json
    trial_root: Path | None = None  # directory with the ranks' files
    replicas: int = 1  # model replicas of the trial
    run_targets: Path | None = None  # the run directory's folder for service discovery
    facts: dict[str, str] = {}  # RUN_FACTS
    launched_unix_s: float = Field(default_factory=time.time)
    expensive_interval_s: float = Field(default=EXPENSIVE_INTERVAL_S, gt=0)
    max_lifetime_s: float = Field(default=DEFAULT_MAX_LIFETIME_S, gt=0)
    restarts: int = 0

    @field_validator("pids")
    @classmethod
    def _are_process_ids(cls, pids: tuple[int, ...]) -> tuple[int, ...]:
        if wrong := [pid for pid in pids if pid < 1]:
            raise ValueError(f"pid: expected a process id, got {wrong[0]}")
        return pids

    @field_validator("facts")
    @classmethod
    def _are_known_facts(cls, facts: dict[str, str]) -> dict[str, str]:
        if wrong := [key for key in facts if key not in RUN_FACTS]:
            raise ValueError(f"info: expected one of {', '.join(RUN_FACTS)}, got {wrong[0]!r}")
        return facts

    @property
    def serves_metrics(self) -> bool:
        return self.settings.listen_port != _NO_METRICS

    def ports(self, host: str) -> tuple[int, ...]:
        """Return the ports to try, in order.

        Each trial has a sidecar of its own. Without a port in the settings, the first choice
        follows from the run directory and the host, so that Prometheus finds all trials of a run
        at one address, without state that trials would have to share.
        """
        if self.settings.listen_port > 0:
            return (self.settings.listen_port,)
        if self.run_targets is None:
            return (0,)
        digest = hashlib.sha256(f"{self.run_targets}\n{host}".encode()).digest()
        return (_FIRST_PORT + int.from_bytes(digest[:4], "big") % _PORTS, 0)


def read_request(stream: BinaryIO) -> SidecarRequest:
    """Read a request, one line of JSON. Raises UsageError if it is none, or too long."""
    line = stream.readline(_LONGEST_REQUEST_BYTES + 1)
    if len(line) > _LONGEST_REQUEST_BYTES:
        raise UsageError(
            f"request of a sidecar: expected one line of at most {_LONGEST_REQUEST_BYTES} bytes; "
            "let Paceline start the sidecar, or use `paceline sidecar`"
        )
    try:
        return SidecarRequest.model_validate_json(line)
    except ValidationError as error:
        raise UsageError(f"request of a sidecar: expected JSON of this version: {error}") from error


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `paceline sidecar` to `parser`."""
    parser.add_argument(
        "--listen",
        metavar="HOST:PORT",
        help="serve Prometheus metrics here; port 0 takes any free port (default: no metrics)",
    )
    parser.add_argument("--interval", metavar="SECONDS", type=float, default=1.0)
    parser.add_argument(
        "--pid",
        metavar="PID",
        type=int,
        action="append",
        default=[],
        help="root of a process tree to watch; may be repeated (default: watch the host alone)",
    )
    parser.add_argument(
        "--out", metavar="FILE", type=Path, required=True, help="write the trace to this file"
    )
    parser.add_argument(
        "--state",
        metavar="FILE",
        type=Path,
        help="write process id, port and interval to this file",
    )
    parser.add_argument(
        "--info",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help=f"label of the metric paceline_run_info ({', '.join(RUN_FACTS)}); may be repeated",
    )
    parser.add_argument("--run", metavar="NAME", default="", help="label `run` of the metrics")
    for name, text in _SETTINGS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", metavar="PATH", help=text)
    parser.add_argument(
        "--max-lifetime",
        metavar="SECONDS",
        type=float,
        default=DEFAULT_MAX_LIFETIME_S,
        help="end after this time in any case (default: 7 days)",
    )


def request_from(arguments: argparse.Namespace) -> SidecarRequest:
    """Return the request that `add_arguments` parsed. Raises UsageError with every fault."""
    listen_host, listen_port = _listen(arguments.listen)
    out: Path = arguments.out
    try:
        return SidecarRequest(
            settings=TelemetrySettings(
                interval_s=arguments.interval,
                listen_host=listen_host,
                listen_port=listen_port,
                **{name: getattr(arguments, name) for name in _SETTINGS},
            ),
            run=arguments.run or out.absolute().parent.name,
            trace=out,
            pids=tuple(arguments.pid),
            state=arguments.state,
            facts=dict(_pair(item) for item in arguments.info),
            max_lifetime_s=arguments.max_lifetime,
        )
    except ValidationError as error:
        raise UsageError(f"sidecar: {'; '.join(_faults(error))}") from error


def _faults(error: ValidationError) -> list[str]:
    return [
        f"{'.'.join(str(part) for part in fault['loc'])}: {fault['msg']}"
        for fault in error.errors(include_url=False)
    ]


def _listen(text: str | None) -> tuple[str, int]:
    if text is None:
        return "127.0.0.1", _NO_METRICS
    host, separator, port = text.rpartition(":")
    if not (separator and host and port.isascii() and port.isdigit()):
        raise UsageError(f"--listen: expected HOST:PORT such as 127.0.0.1:9464, got {text!r}")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _pair(text: str) -> tuple[str, str]:
    key, separator, value = text.partition("=")
    if not separator:
        raise UsageError(f"--info: expected KEY=VALUE, got {text!r}")
    return key, value
