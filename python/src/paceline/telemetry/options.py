"""What a sidecar is asked to do, checked, and the command line that says it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import UsageError
from paceline.telemetry.catalogue import RUN_FACTS

if TYPE_CHECKING:
    import argparse

_FILES = {
    "--tls-certificate": "PEM; metrics are then served over HTTPS only",
    "--tls-key": "its key",
    "--tls-client-ca": "PEM; clients must then show a certificate of it",
    "--basic-auth-file": "a line USER:PASSWORD that clients must know",
    "--bearer-token-file": "a token that clients must know",
}
INTERVAL_LIMITS_S = (0.1, 10.0)
DEFAULT_MAX_LIFETIME_S = 7 * 24 * 3600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class SidecarOptions:
    """Raises UsageError naming every fault at once."""

    listen_host: str = "127.0.0.1"
    listen_port: int | None = None  # None serves no metrics; 0 takes any free port
    interval_s: float = 1.0
    pids: tuple[int, ...] = ()  # roots of the process trees to watch; none: the host alone
    out: Path | None  # the trace, JSON lines, append-only; None keeps the sampler and no more
    state: Path | None = None  # sidecar.json
    info: dict[str, str] = field(default_factory=dict)  # RUN_FACTS of the catalogue
    max_lifetime_s: float = DEFAULT_MAX_LIFETIME_S
    run: str = ""  # the run's name in metrics; that of the trace's folder where it is empty
    trial_root: Path | None = None  # where the ranks' files are
    tls_certificate: Path | None = None  # these five: telemetry.web.WebSettings
    tls_key: Path | None = None
    tls_client_ca: Path | None = None
    basic_auth_file: Path | None = None
    bearer_token_file: Path | None = None
    run_targets: Path | None = None  # the run directory's folder for service discovery
    targets_dirs: tuple[Path, ...] = ()  # others' folders for it
    textfile_dir: Path | None = None
    ends_with_caller: bool = False  # the watch ends when the process that asks for it does
    excludes_caller: bool = False  # that process is not part of what it watches

    def __post_init__(self) -> None:
        if faults := list(self._faults()):
            raise UsageError("sidecar: " + "; ".join(faults))

    def _faults(self) -> list[str]:
        faults = []
        low, high = INTERVAL_LIMITS_S
        if not low <= self.interval_s <= high:
            faults.append(f"interval: expected {low} to {high} seconds, got {self.interval_s}")
        if self.listen_port is not None and not 0 <= self.listen_port <= 65535:
            faults.append(f"listen: expected a port from 0 to 65535, got {self.listen_port}")
        if not self.listen_host:
            faults.append("listen: expected an address such as 127.0.0.1, got nothing")
        faults += [f"pid: expected a process id, got {pid}" for pid in self.pids if pid < 1]
        if not self.max_lifetime_s > 0:
            faults.append(f"max-lifetime: expected seconds above 0, got {self.max_lifetime_s}")
        faults += [
            f"info: expected one of {', '.join(RUN_FACTS)}, got {key!r}"
            for key in self.info
            if key not in RUN_FACTS
        ]
        return faults


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `paceline sidecar` to `parser`."""
    parser.add_argument(
        "--listen",
        metavar="HOST:PORT",
        help="serve Prometheus metrics here; port 0 takes any free one (default: no metrics)",
    )
    parser.add_argument("--interval", metavar="SECONDS", type=float, default=1.0)
    parser.add_argument(
        "--pid",
        metavar="PID",
        type=int,
        action="append",
        default=[],
        help="root of a process tree to watch; may be repeated (default: the host alone, until it "
        "is told to end)",
    )
    parser.add_argument("--out", metavar="FILE", type=Path, required=True, help="the trace")
    parser.add_argument("--state", metavar="FILE", type=Path, help="say here who and where I am")
    parser.add_argument(
        "--info",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help=f"a label of the metric paceline_run_info ({', '.join(RUN_FACTS)}); may be repeated",
    )
    parser.add_argument("--run", metavar="NAME", default="", help="the label `run` of metrics")
    for option, text in _FILES.items():
        parser.add_argument(option, metavar="FILE", type=Path, help=text)
    parser.add_argument(
        "--targets-dir",
        metavar="DIR",
        type=Path,
        action="append",
        default=[],
        help="where Prometheus looks for sidecars (file_sd_configs); may be repeated",
    )
    parser.add_argument(
        "--textfile-dir", metavar="DIR", type=Path, help="where node_exporter looks for metrics"
    )
    parser.add_argument(
        "--max-lifetime",
        metavar="SECONDS",
        type=float,
        default=DEFAULT_MAX_LIFETIME_S,
        help="end after this long whatever happens (default: 7 days)",
    )


def options_from(arguments: argparse.Namespace) -> SidecarOptions:
    """Options from what `add_arguments` parsed. Raises UsageError."""
    listen_host, listen_port = _listen(arguments.listen)
    return SidecarOptions(
        listen_host=listen_host,
        listen_port=listen_port,
        interval_s=arguments.interval,
        pids=tuple(arguments.pid),
        out=arguments.out,
        state=arguments.state,
        info=dict(_pair(item) for item in arguments.info),
        max_lifetime_s=arguments.max_lifetime,
        run=arguments.run,
        tls_certificate=arguments.tls_certificate,
        tls_key=arguments.tls_key,
        tls_client_ca=arguments.tls_client_ca,
        basic_auth_file=arguments.basic_auth_file,
        bearer_token_file=arguments.bearer_token_file,
        targets_dirs=tuple(arguments.targets_dir),
        textfile_dir=arguments.textfile_dir,
        ends_with_caller=True,
        excludes_caller=True,
    )


def _listen(text: str | None) -> tuple[str, int | None]:
    if text is None:
        return "127.0.0.1", None
    host, separator, port = text.rpartition(":")
    if not separator or not port.isascii() or not port.isdigit():
        raise UsageError(f"--listen: expected HOST:PORT such as 127.0.0.1:9464, got {text!r}")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _pair(text: str) -> tuple[str, str]:
    key, separator, value = text.partition("=")
    if not separator:
        raise UsageError(f"--info: expected KEY=VALUE, got {text!r}")
    return key, value
