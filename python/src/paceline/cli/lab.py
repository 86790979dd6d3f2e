"""`paceline lab …`: a cluster of simulated hosts on this machine, for trials and tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

from paceline.base.errors import EnvironmentLacks, ExitCode
from paceline.base.host.processes import shell_status
from paceline.plan.spec.loading import load_spec
from paceline.runner.lab import INTERFACE, Lab, LabSettings, network, why_not
from paceline.runner.lab.network import remove, remove_abandoned
from paceline.runner.lab.record import LabRecord, Registry, settings_for

_name_option = click.option("--name", default="lab", metavar="NAME", help="Name of the lab.")
_slice_option = click.option(
    "--slice",
    "slice_ms",
    metavar="MS",
    type=int,
    default=1,
    help="Of a host that takes turns, in milliseconds: 1 to 20.",
)
# the number of the host, from 0, or its name
_host_argument = click.argument("host")


@click.group("lab")
def command() -> None:
    """Make a cluster of hosts on this machine; needs root."""


@command.command("up")
@click.option("--hosts", metavar="N", type=int, default=2, help="Number of hosts.")
@click.option(
    "--cores",
    metavar="N",
    type=int,
    help="Exclusive cores of each host; default: all hosts share all cores.",
)
@click.option(
    "--slots",
    metavar="N",
    type=int,
    help="Ranks that a host offers; default: the number of its cores.",
)
@click.option(
    "--bandwidth", metavar="RATE", help='Of each link: "1gbit", "100mbit"; default: unlimited.'
)
@click.option(
    "--turns",
    is_flag=True,
    help="Give every host the same cores and let the hosts run one after the other; needs --cores "
    "and --bandwidth.",
)
@_slice_option
@click.option("--no-spark", is_flag=True, help="Do not start Spark.")
@click.option(
    "--logs", metavar="DIR", type=click.Path(path_type=Path), help="Keep the logs of Spark in DIR."
)
@click.option(
    "--exec",
    "shell_line",
    metavar="COMMAND",
    help="Run a shell command on the first host, then remove the lab; the exit code is the "
    "command's.",
)
@_name_option
def up(
    name: str, logs: Path | None, shell_line: str | None, no_spark: bool, **settings: Any
) -> int:  # fmt: skip
    """Make a lab: hosts, links, a Spark standalone cluster, a host list for mpirun.

    Without --exec the lab stays until `paceline lab down`.
    """
    lab = Lab(LabSettings(spark=not no_spark, **settings), name=name, logs=logs)
    if shell_line is not None:
        return _run_and_remove(lab, "sh", "-c", shell_line)
    with ExitStack() as stack:
        stack.callback(lab.close)
        for abandoned in lab.make():
            _say_abandoned(abandoned)
        lab.leave()
        stack.pop_all()  # it stays
    print(_described(lab.record))
    return ExitCode.OK


@command.command("run", context_settings={"ignore_unknown_options": True})
@click.argument("spec", metavar="SPEC")
@click.argument("options", metavar="[OPTIONS OF RUN]...", nargs=-1, type=click.UNPROCESSED)
@click.option("--cores", metavar="N", type=int, default=2, help="Cores of each host; default: 2.")
@click.option(
    "--bandwidth", metavar="RATE", default="1gbit",
    help='Of each link, for trials without a rate of their own; default: "1gbit".',
)  # fmt: skip
@_slice_option
@_name_option
def run_in_lab(
    spec: str, options: tuple[str, ...], name: str, cores: int, bandwidth: str, slice_ms: int
) -> int:
    """Make the hosts that an experiment needs, run it on the first one, and remove them.

    There are as many hosts as the trials with most nodes have. If this machine has too few cores
    for all of them, they take turns. Other options are those of `paceline run`.
    """
    trials, here = load_spec(spec).experiment.trials, len(os.sched_getaffinity(0))
    settings = settings_for(trials, cores=cores, bandwidth=bandwidth, slice_ms=slice_ms, here=here)
    lab = Lab(settings, name=name)
    of_lab = {"network.interface": INTERFACE}
    if any(trial.launcher == "mpi" and trial.nodes > 1 for trial in trials):
        of_lab["mpi.hostfile"] = str(lab.hostfile)
    if settings.spark:
        of_lab["spark.master"] = lab.spark_master
    words = [w for key, value in of_lab.items() for w in ("--set", f"{key}={json.dumps(value)}")]
    return _run_and_remove(lab, sys.executable, "-m", "paceline.cli", "run", spec, *words, *options)


def _run_and_remove(lab: Lab, *words: str) -> int:
    """Make a lab, run a command on its first host, and remove the lab."""
    with ExitStack() as stack:
        stack.callback(lab.close)
        for abandoned in lab.make():
            _say_abandoned(abandoned)
        click.echo(_described(lab.record), err=True)
        return shell_status(subprocess.call(lab.hosts[0].command(*words)))


@command.command("down")
@_name_option
def down(name: str) -> None:
    """Remove a lab with everything in it, and the remains of killed labs."""
    _require_possible()
    registry = Registry()
    there_was = remove(name, registry)
    with registry.locked():
        abandoned = remove_abandoned(registry)
    for each in abandoned:
        _say_abandoned(each)
    if there_was:
        click.echo(f"lab {name} is removed", err=True)
    else:
        others = ", ".join(registry.names())
        known = f"; there are: {others}" if others else ""
        click.echo(f"there is no lab {name}{known}", err=True)


@command.command("exec", context_settings={"allow_interspersed_args": False})
@_name_option
@_host_argument
@click.argument("words", metavar="[COMMAND]...", nargs=-1, type=click.UNPROCESSED)
def execute(name: str, host: str, words: tuple[str, ...]) -> int:
    """Run a command on a host, by default a shell."""
    record = _existing(name)
    own = words[1:] if words[:1] == ("--",) else words
    status = subprocess.call(record.host(host).command(*own))
    return shell_status(status)


@command.command("cut")
@_name_option
@click.option(
    "--at",
    type=click.Choice(("cable", "switch")),
    default="cable",
    help="The host's end of the link, or the switch's, which the host cannot see.",
)
@_host_argument
def cut(name: str, at: Any, host: str) -> None:  # fmt: skip
    """Take a host's link down."""
    record = _existing(name)
    network.cut(record, record.host(host), at)


@command.command("restore")
@_name_option
@_host_argument
def restore(name: str, host: str) -> None:
    """Bring a host's link up again."""
    record = _existing(name)
    network.restore(record, record.host(host))


def _existing(name: str) -> LabRecord:
    _require_possible()
    registry = Registry()
    record = registry.load(name)
    if record is None:
        others = ", ".join(registry.names()) or "none"
        raise click.UsageError(
            f"lab {name!r}: expected one of this machine's labs, there are: {others}; "
            "`paceline lab up` makes one"
        )
    return record


def _require_possible() -> None:
    reason = why_not()
    if reason is not None:
        raise EnvironmentLacks(f"there are no labs here: {reason}")


def _described(record: LabRecord) -> str:
    settings = record.settings
    rate = settings.bandwidth or "as fast as this machine copies"
    lines = [f"lab {record.name}: {len(record.hosts)} hosts, links {rate}"]
    if settings.turns:
        lines.append(
            f"  turns   of {settings.slice_ms} ms, everything takes {settings.dilation} times "
            f"longer (slices in {record.slices})"
        )
    for host in record.hosts:
        cores = ",".join(map(str, host.cores)) or "all"
        lines.append(f"  host    {host.name}  {host.address}  cores {cores}")
    if settings.spark:
        lines.append(f"  Spark   {record.spark_master}  (logs in {record.logs})")
    lines.append(f"  MPI     mpirun --hostfile {record.hostfile} …")
    lines.append(f"  use     paceline lab exec --name {record.name} 0 COMMAND…")
    return "\n".join(lines)


def _say_abandoned(name: str) -> None:
    click.echo(f"removed the remains of lab {name}, whose process was killed", err=True)
