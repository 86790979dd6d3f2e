"""Plans and results of searches as text."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

from rich.table import Table
from rich.text import Text

from paceline.cli.console import plain_console, print_text
from paceline.plan.trials.trial import Trial
from paceline.runner.tune.session import SearchPlan
from paceline.runner.tune.spaces import LeftOut
from paceline.show.report.columns import UNDECIDED_MARK
from paceline.show.report.wording import with_bounds
from paceline.train.transports.bucket_settings import gradient_options_of

if TYPE_CHECKING:
    from paceline.analysis.statistics.intervals import Interval
    from paceline.runner.tune.batch import BatchFinding
    from paceline.runner.tune.search import Findings, TargetResult

LEGEND = "k replicas, s stages, t threads each, m micro-batches; split before these layers"
NO_GAIN = "no gain: not shown to be faster than the default (5 %), which is kept"
_WIDTH = 80
_LOSSY = "is lossy: it does not train the same (docs/explanation/less-traffic.md)"
_MIB = 2**20
_BATCH_COLUMNS = ("batch", "memory", "samples/s", "")


def print_findings(findings: Findings) -> None:
    """Print a table for each workload: the default and the best settings of each target."""
    console = plain_console()
    for number, workload in enumerate(findings.workloads):
        if number:
            console.print()
        table = Table(box=None, pad_edge=False, title=workload, title_justify="left")
        first = "strategy" if findings.compares_targets else "trial"
        for column in (first, "", "settings", "samples/s", "best/default"):
            justify: Literal["left", "right"] = "right" if column == "samples/s" else "left"
            table.add_column(column, justify=justify, overflow="fold", no_wrap=column != "settings")
        ours = [found for found in findings.found if found.target.workload == workload]
        for found in ours:
            if found.candidates or findings.compares_targets:
                for row in _rows(found, findings):
                    table.add_row(*map(Text, row))
        if table.rows:
            console.print(table)
        for line in _remarks(ours, findings):
            wrapped = textwrap.fill(line, _WIDTH, subsequent_indent="  ", break_on_hyphens=False)
            console.print(wrapped)


def print_search_plan(plan: SearchPlan) -> None:
    """Print every candidate, what is left out and why, and the trials after the search."""
    context = plan.context
    settings = context.settings
    print_text(
        f"search on this node, {context.cores} cores: each candidate is measured for "
        f"{settings.steps} steps after {settings.warmup_steps} of warm-up;\n"
        "each round keeps the fastest 1 of 2 and measures them again, "
        f"up to {settings.repeats} times in all"
    )
    for space in plan.spaces:
        print_text(
            f"\n{space.target.workload} {space.target.name}: {len(space.candidates)} candidates"
        )
        for trial in space.candidates:
            note = "  (default)" if trial is space.default else ""
            print_text(f"  {settings_text(trial)}{note}")
        for out in space.left_out:
            print_text(f"  left out: {out.what}: {out.reason}")
    print("\nthen these trials, with winners that are not known yet:")
    for request in context.experiment.trials:
        nodes = f" on {request.nodes} nodes" if request.nodes > 1 else ""
        print_text(f"  {request.launcher} {request.local_strategy}{nodes}")


def search_plan_json(plan: SearchPlan) -> dict[str, Any]:
    return {
        "experiment": plan.context.experiment.name,
        "data": dict(plan.context.datasets),
        "search": [
            {
                "workload": space.target.workload,
                "local_strategy": space.target.name,
                "default": None if space.default is None else space.default.configuration,
                "candidates": [trial.model_dump(mode="json") for trial in space.candidates],
                "left_out": space.left_out,
            }
            for space in plan.spaces
        ],
        "trials": None,  # not known before the search
    }


def settings_text(trial: Trial) -> str:
    """Return for example `k2 s2 t1 m8 1f1b time`; see LEGEND."""
    place = trial.placement
    parts = [f"k{place.replicas_per_node}"] if place.replicas_per_node > 1 else []
    if place.stages > 1:
        parts.append(f"s{place.stages}")
    parts.append(f"t{place.threads_per_worker}")
    if place.stages > 1:
        parts.append(f"m{trial.option('micro_batches')}")
    return " ".join([*parts, *trial.details])


def _rows(found: TargetResult, findings: Findings) -> list[tuple[str, str, str, str, str]]:
    name, settings = found.target.name, communication_text
    if findings.compares_targets:
        is_best = found is findings.best(found.target.workload)
        name += " *" if is_best else f" {UNDECIDED_MARK}" if found.near_best else ""
        settings = settings_text
    rows = []
    if found.default is not None:
        speed = speed_text(found.default_samples_per_s)
        rows.append((name, "default", settings(found.default), speed, ""))
    if found.fastest is not None and found.fastest != found.default:
        speed = speed_text(found.fastest_samples_per_s)
        text = settings(found.fastest)
        rows.append(("" if rows else name, "best", text, speed, ratio_text(found)))
    return rows or [(name, "", "nothing measured", "-", "")]


def speed_text(interval: Interval | None) -> str:
    if interval is None:
        return "failed"
    return f"{interval.estimate:.0f}" if interval.estimate >= 100 else f"{interval.estimate:.3g}"


def ratio_text(found: TargetResult) -> str:
    if found.ratio is None:
        return ""
    text = with_bounds(found.ratio)
    return f"{text} no gain" if found.keeps_default else text


def _remarks(found: Sequence[TargetResult], findings: Findings) -> list[str]:
    """Return the legend of the table, and remarks on each result."""
    if not findings.compares_targets:
        lines = [f"{f.target.name}: {_place(f.default)}" for f in found if f.default is not None]
    else:
        lines = [LEGEND, *(["* fastest of this workload"] if any(f.chosen for f in found) else [])]
    if any(each.near_best for each in found):
        lines.append(f"{UNDECIDED_MARK} undecided: perhaps as fast (5 %)")
    if any(each.keeps_default for each in found):
        lines.append(NO_GAIN)
    return lines + [f"{each.target.name}: {line}" for each in found for line in _remarks_on(each)]


def _place(trial: Trial) -> str:
    """Say which trial of the spec is searched, in the words of its entry."""
    place = trial.placement
    return (
        f"{trial.launcher}, {trial.transport}, {trial.local_strategy}, "
        f"{place.nodes} x {place.ranks_per_node} ranks"
    )


def _remarks_on(found: TargetResult) -> Iterator[str]:
    if found.fastest is not None and found.fastest == found.default and found.candidates > 1:
        yield f"the default is the fastest of {found.candidates} candidates"
    compression = None if found.chosen is None else found.chosen.option("compression")
    if compression is not None:
        yield f"{compression.method} {_LOSSY}"
    yield from _left_out(found.left_out)
    for failure in found.failures.values():
        yield f"failed: {failure.splitlines()[0]}"
    if found.cut_short:
        yield "the time limit was reached; continue with --resume"


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


def communication_text(trial: Trial) -> str:
    """Return what a search may change, for example `25 MB buckets, ring, btl_tcp_links=2`."""
    options = gradient_options_of(trial)
    parts = [f"{options.bucket_mb:g} MB buckets"] if trial.reduction.in_buckets else []
    if options.buckets_in_flight is not None:
        parts.append(f"{options.buckets_in_flight} in flight")
    if options.bucket_wait_ms is not None:
        parts.append(f"{options.bucket_wait_ms:g} ms wait")
    algorithm = trial.option("algorithm")
    if algorithm is not None:
        parts.append(algorithm)
    if options.compression is not None:
        parts.append(options.compression.method)
    parts += trial.launcher_options.labels()
    return ", ".join(parts) or "default"


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
