"""`paceline doctor`: examine this machine or several hosts, and say how to get what is missing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from paceline.base.errors import UsageError
from paceline.base.host.cgroups import read_limits
from paceline.base.host.machine import (
    default_cache_dir,
    machine_facts,
    package_versions,
    torch_cuda,
)
from paceline.base.host.programs import MachineFinding, how_to_install, why_it_failed
from paceline.cli.console import plain_console, print_json
from paceline.cli.options import json_option, list_option
from paceline.plan.spec.extensions import LAUNCHERS, load_object
from paceline.plan.spec.values import bits_per_s
from paceline.runner.preflight.findings import exit_code, findings_of, verdict
from paceline.runner.preflight.hosts import remote_shell
from paceline.runner.preflight.load import Load, Looking
from paceline.runner.preflight.observe import document, observe
from paceline.show.report.section import Column, Table, terminal_table

# Tensors of two trials of the largest workload (VGG16: weights and gradient, 537 MB each) and its
# images.
_WANTED_DISK_BYTES = 4_000_000_000
# The way in which a rank maps the memory of another rank (paceline.collectives.node.memory).
_ATTACH = """
import mmap, sys
with open(sys.argv[1], "r+b") as file, mmap.mmap(file.fileno(), 4) as memory:
    memory[:] = b"seen"
"""
_IMPORT_LIMIT_S = 120.0
_ATTACH_LIMIT_S = 30
_COLUMNS: tuple[Column[MachineFinding], ...] = (
    Column("", lambda finding: "ok" if finding.ok else "--", "name"),
    Column("what", lambda finding: finding.what, "text"),
    Column("in use", lambda finding: finding.found, "text"),
    Column("why, or how to get it", lambda finding: finding.why, "text"),
)
_BETWEEN_HOSTS: tuple[Column[MachineFinding], ...] = (
    *_COLUMNS[:2],
    Column("found", lambda finding: finding.found, "name"),
    Column("why, or how to correct it", lambda finding: finding.why, "text"),
)


@click.command("doctor")
@list_option(
    "--hosts",
    "HOST[:SLOTS],...",
    "Examine these hosts and what is between them; the first one is this host. SLOTS: ranks with "
    "a core each.",
)
@click.option(
    "--interface",
    metavar="NAME",
    help="Network interface between the hosts; default: the one by which the first reaches the "
    "second.",
)
@click.option(
    "--folder",
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="Where run directories will be, on every host; default: this folder.",
)
@click.option("--link", metavar="RATE", help='What each link should have, such as "10gbit".')
@click.option(
    "--agent",
    metavar="COMMAND",
    help="Program that runs a command on a host, called as COMMAND HOST SHELL_LINE; default: that "
    "of mpirun, else ssh.",
)
@click.option(
    "--master",
    metavar="ADDRESS",
    help='Count the free slots of this Spark cluster, such as "spark://node1:7077".',
)
@json_option
def command(
    hosts: tuple[str, ...],
    interface: str | None,
    folder: Path | None,
    link: str | None,
    agent: str | None,
    master: str | None,
    as_json: bool,
) -> int:
    """Show what this machine or several hosts lack."""
    if not hosts:
        _require_none(interface, folder, link, agent, master)
        findings = examine()
        return _show(_COLUMNS, findings, {}, as_json=as_json)
    slots = parse_hosts(hosts)
    rate = None if link is None else bits_per_s(link, "--link")
    shell = remote_shell() if agent is None else agent
    seen = observe(list(slots), shell, interface, (folder or Path()).resolve())
    wanted = {n: count for n, count in enumerate(slots.values()) if count is not None}
    findings = findings_of(seen, wanted, rate)
    if master is not None:
        findings += _cluster(master, sum(count or 1 for count in slots.values()))
    return _show(_BETWEEN_HOSTS, findings, document(seen), as_json=as_json)


def _require_none(*options: object) -> None:
    if any(option is not None for option in options):
        raise UsageError(
            "expected --hosts, because --interface, --folder, --link, --agent and --master are "
            "about several hosts"
        )


def _show(
    columns: Sequence[Column[MachineFinding]],
    findings: Sequence[MachineFinding],
    more: Mapping[str, Any],
    *,
    as_json: bool,
) -> int:
    """Print the findings and, for several hosts, the verdict; return the exit code.

    more: values for JSON, empty for this host alone.
    """
    if as_json:
        print_json({"findings": findings, **more})
    else:
        plain_console().print(terminal_table(Table(columns=columns, items=findings, gap=1)))
    if more and not as_json:
        plain_console().print(f"\n{verdict(findings)}")
    return exit_code(findings)


def parse_hosts(words: Sequence[str]) -> dict[str, int | None]:
    """Return the slots of each host; None where none are given. Raises UsageError."""
    found: dict[str, int | None] = {}
    for word in words:
        name, colon, count = word.partition(":")
        if not name or (colon and not (count.isdecimal() and int(count) > 0)):
            raise UsageError(f"--hosts: expected HOST or HOST:SLOTS, got {word!r}")
        if name in found:
            raise UsageError(f"--hosts: {name} is given twice; name each host once")
        found[name] = int(count) if colon else None
    if len(found) < 2:
        raise UsageError(
            "--hosts: expected at least two hosts, separated by commas; "
            "`paceline doctor` alone examines this one"
        )
    return found


def examine() -> list[MachineFinding]:
    """Examine everything that a trial may need. This changes nothing."""
    facts = machine_facts()
    return [
        _machine(facts),
        _load(Looking().end()),
        _numa(facts["numa_cores"]),
        _gpus(facts["gpus"], torch_cuda()),
        _limits(),
        _shared_memory(),
        _python(),
        _data_sets(),
        *_launchers(),
        _disk(),
    ]


def _machine(facts: Mapping[str, Any]) -> MachineFinding:
    threads, cores = facts["usable_cores"], facts["usable_physical_cores"]
    siblings = "" if threads == cores else f" (hardware threads of {cores})"
    return MachineFinding(
        what="machine",
        found=f"{threads} cores{siblings}, {facts['ram_bytes'] / 2**30:.0f} GiB",
        why=f"{facts['cpu_model']}, {facts['kernel']}",
    )


def _load(load: Load) -> MachineFinding:
    return MachineFinding(
        what="load",
        found=f"{load.others_percent + load.stolen_percent:.0f} % of the cores"
        if load.is_known
        else "unknown",
        why=f"{load.words}: speeds that are measured now would be too low"
        if load.is_disturbing
        else load.words,
    )


def _numa(numa_cores: Mapping[str, Sequence[int]]) -> MachineFinding:
    sizes = [len(cores) for cores in numa_cores.values()]
    return MachineFinding(
        what="NUMA nodes",
        found=f"{len(sizes)} of {', '.join(map(str, sizes))} cores" if sizes else "unknown",
        why="the cores of a rank are on one node if they fit"
        if sizes
        else "the kernel does not report them; cores are allocated in the order of their numbers",
    )


def _gpus(models: Sequence[str], cuda: str | None) -> MachineFinding:
    if not models:
        return MachineFinding(what="GPUs", found="none", why='only device = "cpu" works')
    return MachineFinding(
        what="GPUs",
        ok=cuda is not None,
        found=", ".join(f"{count} x {model}" for model, count in Counter(models).items()),
        why=f'torch is built for CUDA {cuda}: device = "cuda" uses them'
        if cuda
        else "torch is built without CUDA; install the same version's CUDA build (pytorch.org, "
        'Get Started) to use device = "cuda"',
    )


def _shared_memory() -> MachineFinding:
    """Check that one process can map the memory of another; local strategies need it."""
    fault = None
    try:
        with os.fdopen(os.memfd_create("paceline-doctor"), "r+b", buffering=0) as memory:
            memory.truncate(4)
            subprocess.run(
                [sys.executable, "-P", "-c", _ATTACH, f"/proc/{os.getpid()}/fd/{memory.fileno()}"],
                capture_output=True, text=True, timeout=_ATTACH_LIMIT_S, check=True,
            )  # fmt: skip
            if memory.read() != b"seen":
                fault = "what another process wrote did not arrive"
    except subprocess.CalledProcessError as error:
        fault = error.stderr.strip().rpartition("\n")[2]
    except (OSError, subprocess.TimeoutExpired) as error:
        fault = str(error)
    return MachineFinding(
        what="shared memory",
        ok=fault is None,
        found="works" if fault is None else "fails",
        why="processes of a node exchange gradients and activations through it"
        if fault is None
        else f"{fault}; processes must run as one user, see each other in /proc and have "
        "memfd_create; without shared memory pipelines cannot run, and local strategy processes "
        "needs transport gloo or mpi",
    )


def _limits() -> MachineFinding:
    found = read_limits().words or "no limit"
    return MachineFinding(what="cgroup", found=found, why="limits of this container")


def _python() -> MachineFinding:
    versions = package_versions()
    fault = _import_fault("torch") if "torch" in versions else None
    if "torch" not in versions:
        why = "`pip install torch` brings what every rank needs"
    elif fault is not None:
        why = f"torch {versions['torch']} cannot be imported: {fault}; reinstall it"
    else:
        why = f"torch {versions['torch']}"
    return MachineFinding(
        what="Python",
        ok=sys.version_info[:2] >= (3, 11) and "torch" in versions and fault is None,
        found=versions["python"],
        why=why,
    )


def _data_sets() -> MachineFinding:
    versions = package_versions()
    found = [f"{name} {versions[name]}" for name in ("petastorm", "pyarrow") if name in versions]
    return MachineFinding(
        what="data sets",
        ok=len(found) == 2,
        found=", ".join(found) or "missing",
        why="for `paceline data`, the built-in workloads and own tasks; scripts need none"
        if len(found) == 2
        else f"`{how_to_install('petastorm')}` brings petastorm and pyarrow; scripts need none",
    )


def _import_fault(module: str) -> str | None:
    """Import `module` in a new process and return its error: installed files may fail to load."""
    try:
        ended = subprocess.run(
            [sys.executable, "-P", "-c", f"import {module}"],
            capture_output=True, text=True, timeout=_IMPORT_LIMIT_S, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return None if ended.returncode == 0 else why_it_failed(ended)


def _launchers() -> list[MachineFinding]:
    """Return the findings of every installed launcher, each under its own name."""
    paths = [launcher.checks for launcher in LAUNCHERS.all() if launcher.checks is not None]
    return [finding for path in paths for finding in load_object(path)()]


def _cluster(master: str, slots: int) -> list[MachineFinding]:
    """Return the findings of the launchers that know clusters."""
    paths = [each.cluster_checks for each in LAUNCHERS.all() if each.cluster_checks is not None]
    return [finding for path in paths for finding in load_object(path)(master, slots)]


def _disk() -> MachineFinding:
    cache = default_cache_dir()
    existing = next(path for path in (cache, *cache.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    return MachineFinding(
        what="disk",
        ok=free >= _WANTED_DISK_BYTES,
        found=f"{free / 1e9:.0f} GB free",
        why=f"data sets are kept in {cache}; about {_WANTED_DISK_BYTES / 1e9:.0f} GB are needed "
        f"there and in {Path.cwd()}; set PACELINE_CACHE to use another disk",
    )
