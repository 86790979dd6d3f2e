"""Result of `tune comm` as text: one table per trial."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Literal

from rich.table import Table
from rich.text import Text

from paceline.cli.console import plain_console
from paceline.cli.findings import TIE, ratio_text, remarks_on, speed_text
from paceline.transports.bucket_settings import gradient_options_of

if TYPE_CHECKING:
    from rich.console import Console

    from paceline.plan.trial import Trial
    from paceline.tune.findings import Finding, Findings

_WIDTH = 80
_LOSSY = "is lossy: it does not train the same (docs/explanation/compression.md)"


def print_comm_findings(found: Findings) -> None:
    """Print default and best of every searched trial, then remarks."""
    console = plain_console()
    searched = [finding for finding in found.found if finding.candidates]
    for finding in searched:
        _print_speeds(console, finding)
        console.print()
    lines = [TIE] if any(finding.tie for finding in searched) else []
    for finding in found.found:
        lines += remarks_on(finding, f"{finding.target.workload} {finding.target.name}")
    for line in lines:
        wrapped = textwrap.fill(line, _WIDTH, subsequent_indent="  ", break_on_hyphens=False)
        console.print(wrapped)


def communication_text(trial: Trial) -> str:
    """Return what a search may change, for example `25 MB buckets, ring, btl_tcp_links=2`."""
    options = gradient_options_of(trial)
    parts = [f"{options.bucket_mb:g} MB buckets"] if _in_buckets(trial) else []
    if options.buckets_in_flight is not None:
        parts.append(f"{options.buckets_in_flight} in flight")
    algorithm = trial.option("algorithm")
    if algorithm is not None:
        parts.append(algorithm)
    if options.compression is not None:
        parts.append(options.compression.method)
    parts += trial.launcher_options.labels()
    return ", ".join(parts) or "default"


def _in_buckets(trial: Trial) -> bool:
    is_flat = trial.option("reduction") != "hierarchical" and trial.option("averaging") is None
    return is_flat and trial.placement.replicas_per_rank == trial.placement.stages == 1


def _print_speeds(console: Console, finding: Finding) -> None:
    table = Table(box=None, pad_edge=False, title=_title(finding), title_justify="left")
    for column in ("", "communication", "samples/s", "best/default"):
        justify: Literal["left", "right"] = "right" if column == "samples/s" else "left"
        table.add_column(column, justify=justify, overflow="fold")
    if finding.default is not None:
        speed = speed_text(finding.default_samples_per_s)
        text = communication_text(finding.default)
        table.add_row(*map(Text, ("default", text, speed, "")))
    if finding.fastest is not None and finding.fastest != finding.default:
        speed, ratio = speed_text(finding.fastest_samples_per_s), ratio_text(finding)
        text = communication_text(finding.fastest)
        table.add_row(*map(Text, ("best", text, speed, ratio)))
    console.print(table)
    for line in _verdict(finding):
        console.print(line)


def _title(finding: Finding) -> str:
    name = f"{finding.target.workload} {finding.target.name}"
    trial = finding.default
    if trial is None:
        return name
    place = trial.placement
    return (
        f"{name}: {trial.launcher}, {trial.transport}, {trial.local_strategy}, "
        f"{place.nodes} x {place.ranks_per_node} ranks"
    )


def _verdict(finding: Finding) -> list[str]:
    lines = []
    if finding.fastest is not None and finding.fastest == finding.default:
        lines.append(f"the default is the fastest of {finding.candidates} candidates")
    chosen = None if finding.chosen is None else finding.chosen.option("compression")
    if chosen is not None:
        lines.append(f"{chosen.method} {_LOSSY}")
    return lines
