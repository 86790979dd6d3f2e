"""What a sidecar is asked to do, checked, and the command line that says it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import UsageError

if TYPE_CHECKING:
    import argparse

INTERVAL_LIMITS_S = (0.1, 10.0)
DEFAULT_MAX_LIFETIME_S = 7 * 24 * 3600.0
_LABEL = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*")  # Prometheus data model


@dataclass(frozen=True, kw_only=True, slots=True)
class SidecarOptions:
    """Raises UsageError naming every fault at once."""

    listen_host: str = "127.0.0.1"
    listen_port: int | None = None  # None serves no metrics; 0 takes any free port
    interval_s: float = 1.0
    pids: tuple[int, ...]  # roots of the process trees to watch
    out: Path  # the trace, JSON lines, append-only
    state: Path | None = None  # sidecar.json
    info: dict[str, str] = field(default_factory=dict)  # labels of paceline_run_info
    max_lifetime_s: float = DEFAULT_MAX_LIFETIME_S

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
        if not self.pids:
            faults.append("pid: expected at least one process to watch, got none")
        faults += [f"pid: expected a process id, got {pid}" for pid in self.pids if pid < 1]
        if not self.max_lifetime_s > 0:
            faults.append(f"max-lifetime: expected seconds above 0, got {self.max_lifetime_s}")
        faults += [
            f"info: expected a key of letters, digits and '_' other than 'host', got {key!r}"
            for key in self.info
            if not _LABEL.fullmatch(key) or key == "host"
        ]
        return faults

    def arguments(self) -> list[str]:
        """The command line that `add_arguments` and `options_from` turn into these options."""
        # NAME=VALUE in one word: a value may begin with a dash.
        argv = [f"--interval={self.interval_s!r}", f"--out={self.out}"]
        if self.listen_port is not None:
            host = f"[{self.listen_host}]" if ":" in self.listen_host else self.listen_host
            argv.append(f"--listen={host}:{self.listen_port}")
        argv += [f"--pid={pid}" for pid in self.pids]
        if self.state is not None:
            argv.append(f"--state={self.state}")
        argv += [f"--info={key}={value}" for key, value in self.info.items()]
        return [*argv, f"--max-lifetime={self.max_lifetime_s!r}"]


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
        required=True,
        help="root of a process tree to watch; may be repeated",
    )
    parser.add_argument("--out", metavar="FILE", type=Path, required=True, help="the trace")
    parser.add_argument("--state", metavar="FILE", type=Path, help="say here who and where I am")
    parser.add_argument(
        "--info",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="a label of the metric paceline_run_info; may be repeated",
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
