"""`paceline sidecar`: sample this host and processes, beside a training of any kind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from pydantic import ValidationError

from paceline.cli.options import limit_option, list_option, out_option
from paceline.measure.telemetry.request import DEFAULT_MAX_LIFETIME_S, NO_METRICS, SidecarRequest
from paceline.measure.telemetry.sidecar import run_sidecar
from paceline.plan.spec.models import TelemetrySettings
from paceline.plan.spec.sentences import sentences

# Options that are settings of [telemetry] under the same name.
_SETTINGS = {
    "tls_certificate": "PEM; serve metrics over HTTPS only.",
    "tls_key": "PEM; private key of the certificate.",
    "tls_client_ca": "PEM; require a client certificate of this authority.",
    "basic_auth_file": "File with one line USER:PASSWORD, required from clients.",
    "bearer_token_file": "File with a token, required from clients.",
    "targets_dir": "Directory in which Prometheus looks for sidecars (file_sd_configs).",
    "textfile_dir": "Directory in which node_exporter looks for metrics.",
}


def _takes_settings(function: Callable[..., Any]) -> Callable[..., Any]:
    for name, text in reversed(_SETTINGS.items()):
        option = click.option(f"--{name.replace('_', '-')}", metavar="PATH", help=text)
        function = option(function)
    return function


@click.command("sidecar")
@click.option(
    "--listen",
    metavar="HOST:PORT",
    help="Serve Prometheus metrics here; port 0 takes any free port; default: no metrics.",
)
@click.option(
    "--interval",
    "interval_s",
    metavar="SECONDS",
    type=float,
    default=1.0,
    help="Time between two samples.",
)
@list_option("--pid", "PID,…", "Roots of process trees to watch; default: watch the host alone.")
@out_option("FILE", "Write the trace to this file.", required=True)
@click.option(
    "--state",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Write process id, port and interval to this file.",
)
@click.option("--run", metavar="NAME", help="Label `run` of the metrics.")
@_takes_settings
@limit_option("End after this time in any case; default: 7 days.")
def command(
    listen: str | None,
    interval_s: float,
    pid: tuple[str, ...],
    out: Path,
    state: Path | None,
    run: str | None,
    limit_s: float | None,
    **settings: Any,
) -> None:  # fmt: skip
    """Sample the resources of this host and of processes.

    `paceline run` starts it itself; use it beside other programs.
    """
    listen_host, listen_port = _address(listen)
    try:
        request = SidecarRequest(
            settings=TelemetrySettings(
                interval_s=interval_s,
                listen_host=listen_host,
                listen_port=listen_port,
                **settings,
            ),
            run=run or out.absolute().parent.name,
            trace=out,
            pids=tuple(map(_process_id, pid)),
            state=state,
            max_lifetime_s=limit_s or DEFAULT_MAX_LIFETIME_S,
        )
    except ValidationError as error:
        raise click.UsageError(f"sidecar: {'; '.join(sentences(error.errors()))}") from error
    run_sidecar(request)


def _address(text: str | None) -> tuple[str, int]:
    if text is None:
        return "127.0.0.1", NO_METRICS
    host, separator, port = text.rpartition(":")
    if not (separator and host and port.isascii() and port.isdigit()):
        raise click.UsageError(f"--listen: expected HOST:PORT such as 127.0.0.1:9464, got {text!r}")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _process_id(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise click.UsageError(f"--pid: expected process ids, got {text!r}")
    return int(text)
