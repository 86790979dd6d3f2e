"""Plans and results of searches as text."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any, Literal

from rich.table import Table
from rich.text import Text

from paceline.cli.console import plain_console
from paceline.records.rows import SCHEMA
from paceline.spec.extensions import STRATEGIES
from paceline.transports.bucket_settings import gradient_options_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from paceline.analysis.statistics.intervals import Interval
    from paceline.plan.trial import Trial
    from paceline.tune.batch import BatchFinding
    from paceline.tune.findings import Finding, Findings
    from paceline.tune.method import SearchPlan
    from paceline.tune.spaces import LeftOut

LEGEND = "k replicas, s stages, t threads each, m micro-batches; split before these layers"
TIE = "tie, slower: no significant improvement (95 % interval), so the default is kept"
_COLUMNS = ("strategy", "", "settings", "samples/s", "best/default")
_WIDTH = 80
_LOSSY = "is lossy: it does not train the same (docs/explanation/compression.md)"
_MIB = 2**20
_BATCH_COLUMNS = ("batch", "memory", "samples/s", "")


def print_findings(findings: Findings) -> None:
    """Print a table for each workload: the default and the best settings of each strategy."""
    console = plain_console()
    for number, workload in enumerate(findings.workloads):
        if number:
            console.print()
        best = findings.best(workload)
        table = Table(box=None, pad_edge=False, title=workload, title_justify="left")
        for column in _COLUMNS:
            table.add_column(column, justify="right" if column == "samples/s" else "left")
        ours = [found for found in findings.found if found.target.workload == workload]
        for found in ours:
            for row in _rows(found, fastest=found is best):
                table.add_row(*map(Text, row))
        console.print(table)
        console.print(LEGEND)
        for line in _remarks(ours):
            console.print(line)


def print_search_plan(plan: SearchPlan) -> None:
    """Print every candidate, what is left out and why, and the trials after the search."""
    context = plan.context
    settings = context.settings
    print(
        f"search on this node, {context.cores} cores: candidates are measured for "
        f"{settings.steps} steps after {settings.warmup_steps},\n"
        f"1 of {settings.reduction_factor} is measured again, up to {settings.repeats} times each"
    )
    for space in plan.spaces:
        print(f"\n{space.target.workload} {space.target.name}: {len(space.candidates)} candidates")
        for trial in space.candidates:
            note = "  (default)" if trial is space.default else ""
            print(f"  {settings_text(trial)}{note}")
        for out in space.left_out:
            print(f"  left out: {out.what}: {out.reason}")
    print("\nthen these trials, with winners that are not known yet:")
    for request in context.experiment.trials:
        nodes = f" on {request.nodes} nodes" if request.nodes > 1 else ""
        print(f"  {request.launcher} {request.local_strategy}{nodes}")


def search_plan_json(plan: SearchPlan) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "experiment": plan.context.experiment.name,
        "data": dict(plan.context.datasets),
        "search": [
            {
                "workload": space.target.workload,
                "local_strategy": space.target.name,
                "default": None if space.default is None else space.default.configuration,
                "candidates": [trial.model_dump(mode="json") for trial in space.candidates],
                "left_out": [out.to_json() for out in space.left_out],
            }
            for space in plan.spaces
        ],
        "trials": None,  # not known before the search
    }


def settings_text(trial: Trial) -> str:
    """Return for example `k2 s2 t1 m8 1f1b time`; see LEGEND."""
    place, strategy = trial.placement, STRATEGIES.get(trial.local_strategy)
    parts = [f"k{place.replicas_per_node}"] if strategy.is_replicated else []
    if strategy.is_pipelined:
        parts.append(f"s{place.stages}")
    parts.append(f"t{place.threads_per_worker}")
    if strategy.is_pipelined:
        parts.append(f"m{trial.option('micro_batches')}")
    return " ".join([*parts, *trial.details])


def _rows(found: Finding, *, fastest: bool) -> list[tuple[str, str, str, str, str]]:
    name = found.target.name + (" *" if fastest else " =" if found.ties_best else "")
    rows = []
    if found.default is not None:
        speed = speed_text(found.default_samples_per_s)
        rows.append((name, "default", settings_text(found.default), speed, ""))
    if found.fastest is not None and found.fastest != found.default:
        rows.append(
            (
                "" if rows else name,
                "best",
                settings_text(found.fastest),
                speed_text(found.fastest_samples_per_s),
                ratio_text(found),
            )
        )
    return rows or [(name, "", "nothing measured", "-", "")]


def speed_text(interval: Interval | None) -> str:
    if interval is None:
        return "failed"
    return f"{interval.median:.0f}" if interval.median >= 100 else f"{interval.median:.3g}"


def ratio_text(found: Finding) -> str:
    if found.ratio is None:
        return ""
    r = found.ratio
    text = f"{r.median:.2f} ({r.low:.2f} to {r.high:.2f})"
    if r.high < 1:
        return f"{text} slower"
    return f"{text} tie" if found.tie else text


def remarks_on(found: Finding, name: str) -> list[str]:
    """Return remarks on a result, each beginning with `name`."""
    lines = [f"{name}: {line}" for line in _left_out(found.left_out)]
    lines += [f"{name}: failed: {_first_line(f)}" for f in found.failures.values()]
    if found.cut_short:
        lines.append(f"{name}: the time limit was reached; continue with --resume")
    return lines


def _left_out(left_out: Sequence[LeftOut]) -> list[str]:
    """Name what was left out; of several entries, give the count and the first one."""
    if not left_out:
        return []
    first = left_out[0]
    if len(left_out) == 1:
        return [f"left out: {first.what}: {first.reason}"]
    count = sum(each.count for each in left_out)
    example = f"{first.what}: {first.reason}"
    return [f"{count} candidates left out, for example {example} (tuning.json lists all)"]


def _first_line(text: str) -> str:
    return text.splitlines()[0]


def _remarks(findings: list[Finding]) -> list[str]:
    lines = ["* fastest of this workload"] if any(f.chosen for f in findings) else []
    if any(f.ties_best for f in findings):
        lines.append("= tie with it: the difference may be chance (95 % interval)")
    if any(f.tie for f in findings):
        lines.append(TIE)
    return lines + [line for found in findings for line in remarks_on(found, found.target.name)]


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


def print_batch_findings(found: Sequence[BatchFinding]) -> None:
    """Print a table for each configuration: memory and speed of each batch size."""
    console = plain_console()
    for each in found:
        console.print(Text(f"{each.configuration}: {_largest(each)}"))
        table = Table(box=None, pad_edge=False)
        for column in _BATCH_COLUMNS:
            table.add_column(column, justify="right" if column else "left")
        for probe in each.probes:
            measured, speed = probe.measured_bytes, probe.samples_per_s
            row = (
                str(probe.global_batch),
                f"{measured / _MIB:.0f} MiB" if measured else "",
                "" if speed is None else f"{speed:.3g}",
                "" if probe.fits else "does not fit",
            )
            table.add_row(*map(Text, row))
        console.print(table)
        console.print()
    console.print("Peak memory of the ranks of a node, without pages of files.")


def _largest(found: BatchFinding) -> str:
    if found.largest_batch is None:
        return "no batch fits"
    limit = "memory" if found.limited_by == "memory" else "the samples of the data set"
    return f"at most {found.largest_batch}, limited by {limit}"
