"""`paceline lab …`: a cluster of simulated hosts on this machine, for trials and tests."""

from __future__ import annotations

import argparse
import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cli.console import print_json
from paceline.cli.signals import SIGNAL_BASE
from paceline.errors import EnvironmentLacks, ExitCode, UsageError
from paceline.records.rows import SCHEMA

if TYPE_CHECKING:
    from paceline.lab.record import LabRecord
    from paceline.lab.session import Lab

_DEFAULT_NAME = "lab"


def add(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb to the command line."""
    lab = verbs.add_parser("lab", help="make a cluster of hosts on this machine; needs root")
    actions = lab.add_subparsers(title="actions", metavar="ACTION", required=True)
    _add_up(actions)
    down = actions.add_parser(
        "down", help="remove a lab with everything in it, and the remains of killed labs"
    )
    _add_name(down)
    down.set_defaults(command=_down)
    listed = actions.add_parser("list", help="list the labs of this machine")
    listed.add_argument("--json", action="store_true")
    listed.set_defaults(command=_list)
    run = actions.add_parser("exec", help="run a command on a host")
    _add_host(run)
    run.add_argument("words", nargs=argparse.REMAINDER, metavar="COMMAND…", help="default: a shell")
    run.set_defaults(command=_exec)
    cut = actions.add_parser("cut", help="take a host's link down")
    _add_host(cut)
    cut.add_argument(
        "--at", choices=("cable", "switch"), default="cable",
        help="the host's end of the link, or the switch's, which the host cannot see "
        "(default: cable)",
    )  # fmt: skip
    cut.set_defaults(command=_cut)
    restore = actions.add_parser("restore", help="bring a host's link up again")
    _add_host(restore)
    restore.set_defaults(command=_restore)


def _add_up(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    up = actions.add_parser(
        "up",
        help="make a lab: hosts, links, a Spark standalone cluster, a host list for mpirun",
        description="Makes hosts with names, addresses, cores and links of their own, starts a "
        "Spark master and workers on them, and writes a host list and an agent for mpirun. "
        "Without --exec the lab stays until `paceline lab down`.",
    )
    up.add_argument("--hosts", type=int, default=2, metavar="N", help="default: 2")
    up.add_argument(
        "--cores",
        type=int,
        metavar="N",
        help="exclusive cores of each host; default: all hosts share all cores",
    )
    up.add_argument(
        "--slots",
        type=int,
        metavar="N",
        help="ranks that a host offers; default: the number of its cores",
    )
    up.add_argument(
        "--bandwidth", metavar="RATE", help='of each link: "1gbit", "100mbit"; default: unlimited'
    )
    up.add_argument("--no-spark", action="store_true", help="do not start Spark")
    up.add_argument("--logs", type=Path, metavar="DIR", help="keep the logs of Spark in DIR")
    up.add_argument(
        "--exec", metavar="COMMAND", dest="shell_line",
        help="run a shell command on the first host, then remove the lab; "
        "the exit code is the command's",
    )  # fmt: skip
    _add_name(up)
    up.set_defaults(command=_up)


def _add_name(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--name", default=_DEFAULT_NAME, help=f"name of the lab (default: {_DEFAULT_NAME})"
    )


def _add_host(parser: argparse.ArgumentParser) -> None:
    _add_name(parser)
    parser.add_argument("host", metavar="HOST", help="number of the host, from 0, or its name")


def _up(arguments: argparse.Namespace) -> int:
    from paceline.lab import Lab, LabSettings

    settings = LabSettings(
        hosts=arguments.hosts,
        cores=arguments.cores,
        slots=arguments.slots,
        bandwidth=arguments.bandwidth,
        spark=not arguments.no_spark,
    )
    lab = Lab(settings, name=arguments.name, logs=arguments.logs)
    try:
        for name in lab.make():
            _say_abandoned(name)
        if arguments.shell_line is None:
            lab.leave()
        else:
            _say(_described(lab.record))
            return _run_on_first(lab, arguments.shell_line)
    except BaseException:
        lab.close()
        raise
    finally:
        if arguments.shell_line is not None:
            lab.close()
    print(_described(lab.record))
    return ExitCode.OK


def _run_on_first(lab: Lab, shell_line: str) -> int:
    status = subprocess.call(lab.hosts[0].command("sh", "-c", shell_line))
    return status if status >= 0 else SIGNAL_BASE - status


def _down(arguments: argparse.Namespace) -> int:
    from paceline.lab.registry import Registry
    from paceline.lab.removal import remove, remove_abandoned

    _require_possible()
    registry = Registry()
    there_was = remove(arguments.name, registry)
    with registry.locked():
        abandoned = remove_abandoned(registry)
    for name in abandoned:
        _say_abandoned(name)
    if there_was:
        _say(f"lab {arguments.name} is removed")
    else:
        others = ", ".join(registry.names())
        _say(f"there is no lab {arguments.name}" + (f"; there are: {others}" if others else ""))
    return ExitCode.OK


def _list(arguments: argparse.Namespace) -> int:
    from paceline.lab.registry import Registry
    from paceline.lab.removal import is_abandoned

    _require_possible()
    registry = Registry()
    found = {name: registry.load(name) for name in registry.names()}
    states = {name: _state(record, is_abandoned(record)) for name, record in found.items()}
    if arguments.json:
        labs = [_json(name, record, states[name]) for name, record in found.items()]
        print_json({"schema": SCHEMA, "labs": labs})
        return ExitCode.OK
    for name, record in found.items():
        print(f"{_described(record) if record else f'lab {name}'}\n  state   {states[name]}")
    if not found:
        _say("there is no lab; `paceline lab up` makes one")
    return ExitCode.OK


def _exec(arguments: argparse.Namespace) -> int:
    record = _existing(arguments.name)
    words = arguments.words[1:] if arguments.words[:1] == ["--"] else arguments.words
    status = subprocess.call(record.host(arguments.host).command(*words))
    return status if status >= 0 else SIGNAL_BASE - status


def _cut(arguments: argparse.Namespace) -> int:
    from paceline.lab import network

    record = _existing(arguments.name)
    network.cut(record, record.host(arguments.host), arguments.at)
    return ExitCode.OK


def _restore(arguments: argparse.Namespace) -> int:
    from paceline.lab import network

    record = _existing(arguments.name)
    network.restore(record, record.host(arguments.host))
    return ExitCode.OK


def _existing(name: str) -> LabRecord:
    from paceline.lab.registry import Registry

    _require_possible()
    registry = Registry()
    record = registry.load(name)
    if record is None:
        others = ", ".join(registry.names()) or "none"
        raise UsageError(
            f"lab {name!r}: expected one of this machine's labs, there are: {others}; "
            "`paceline lab up` makes one"
        )
    return record


def _require_possible() -> None:
    from paceline.lab import why_not

    reason = why_not()
    if reason is not None:
        raise EnvironmentLacks(f"there are no labs here: {reason}")


def _state(record: LabRecord | None, abandoned: bool) -> str:
    if abandoned or record is None:
        return "abandoned; `paceline lab down` removes it"
    return "up" if record.owner_pid is None else f"up until process {record.owner_pid} ends"


def _described(record: LabRecord) -> str:
    settings = record.settings
    rate = settings.bandwidth or "as fast as this machine copies"
    lines = [f"lab {record.name}: {len(record.hosts)} hosts, links {rate}"]
    for host in record.hosts:
        cores = ",".join(map(str, host.cores)) or "all"
        lines.append(f"  host    {host.name}  {host.address}  cores {cores}")
    if settings.spark:
        lines.append(f"  Spark   {record.spark_master}  (logs in {record.logs})")
    lines.append(f"  MPI     mpirun --hostfile {record.hostfile} …")
    lines.append(f"  use     paceline lab exec --name {record.name} 0 COMMAND…")
    return "\n".join(lines)


def _json(name: str, record: LabRecord | None, state: str) -> dict[str, Any]:
    if record is None:
        return {"name": name, "state": state}
    return {
        "name": name,
        "state": state,
        "hosts": [
            {"name": host.name, "address": host.address, "cores": host.cores}
            for host in record.hosts
        ],
        "settings": dataclasses.asdict(record.settings),
        "hostfile": str(record.hostfile),
        "agent": str(record.agent),
        "spark_master": record.spark_master if record.settings.spark else None,
        "logs": record.logs,
    }


def _say_abandoned(name: str) -> None:
    _say(f"removed the remains of lab {name}, whose process was killed")


def _say(text: str) -> None:
    print(text, file=sys.stderr)
