"""The live view as text: a screen of 80 columns or more, or one line."""

from __future__ import annotations

import math
import time
from itertools import pairwise
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from paceline.monitor.views import HostView, RankView, RunView, TrialView

_LABEL = 10  # columns of the labels
_BARS = "▁▂▃▄▅▆▇█"
# for each phase: words, a colour, and a shade for screens without colours
_PHASES = {
    "forward": ("forward", "#56B4E9", "▓"),
    "backward": ("backward", "#0072B2", "█"),
    "comm_wait": ("waiting for ranks", "#E69F00", "░"),
    "comm_transfer": ("transfer", "#D55E00", "▒"),
    "bubble": ("waiting for stages", "#CC79A7", "░"),
    "optimizer": ("optimiser", "#009E73", "▓"),
    "data_wait": ("waiting for data", "#F0E442", "░"),
    "other": ("other", "#999999", "▒"),
}
_LEAST_SHARE = 0.005  # of a step that is worth a word
_FIXED_LINES = 12  # of a screen: all but ranks and hosts
_FEWEST_RANK_LINES = 4
_UNKNOWN = "\N{EN DASH}"
_GIB = 2**30
_MIB = 2**20


def screen(view: RunView, width: int, height: int) -> RenderableType:
    """Return the whole view, `width` columns and about `height` lines."""
    parts: list[RenderableType] = [_heading(view, width)]
    if view.trial is None:
        parts.append(Text(_between(view), style="dim"))
    else:
        parts += _trial(view.trial, width, height)
    if view.message:
        parts.append(Text(f"failed: {view.message}", style="red"))
    return Group(*parts)


def plain_line(view: RunView) -> str:
    """Return the state of the run as one line, for logs and pipes."""
    words = [time.strftime("%H:%M:%S"), _count(view)]
    if view.trial is None:
        return " ".join([*words, _between(view)])
    trial = view.trial
    words += [trial.trial_id, f"step {_steps(trial)}"]
    if trial.samples_per_s is not None:
        words.append(f"{_number(trial.samples_per_s)} samples/s")
    if trial.loss is not None:
        words.append(f"loss {trial.loss:.4g}")
    words += [f"{name} {share:.0%}" for name, share in _waiting(trial.phases).items()]
    words += [" ".join([host.host, *_host_parts(host)]) for host in trial.hosts]
    if trial.straggler:
        words.append(f"straggler: {trial.straggler}")
    return " ".join(words)


def sparkline(values: Sequence[float], columns: int) -> str:
    """Draw the means of as many parts as there are columns, scaled from lowest to highest.

    Values that are not finite, such as a loss that is not known, are left out.
    """
    values = [value for value in values if math.isfinite(value)]
    if not values or columns < 1:
        return ""
    pieces = min(columns, len(values))
    bounds = [len(values) * i // pieces for i in range(pieces + 1)]
    means = [sum(values[low:high]) / (high - low) for low, high in pairwise(bounds)]
    low, high = min(means), max(means)
    if high == low:
        return _BARS[3] * pieces
    return "".join(_BARS[round((m - low) / (high - low) * (len(_BARS) - 1))] for m in means)


def _heading(view: RunView, width: int) -> Table:
    left = Text(view.name, style="bold")
    if view.stage:
        left.append(f" ({view.stage})", style="dim")
    right = Text(_count(view))
    if view.failed:
        right.append(f", {view.failed} failed", style="red")
    if view.elapsed_s is not None:
        right.append(f", {_clock(view.elapsed_s)}", style="dim")
    line = Table.grid(expand=False)
    line.add_column(width=width - len(right), no_wrap=True, overflow="ellipsis")
    line.add_column(justify="right", no_wrap=True)
    line.add_row(left, right)
    return line


def _count(view: RunView) -> str:
    return f"{view.done} done" if view.planned is None else f"{view.done} of {view.planned} done"


def _between(view: RunView) -> str:
    if view.ended:
        return "the run has ended"
    started = view.done + view.failed
    return "waiting for the next trial" if started else "waiting for the first trial"


def _trial(trial: TrialView, width: int, height: int) -> Iterator[RenderableType]:
    number = "" if trial.number is None else f"{trial.number}: "
    yield Text(f"{number}{trial.trial_id}", style="bold", no_wrap=True, overflow="ellipsis")
    yield _progress(trial, width)
    spark = max(10, width - _LABEL - 16)
    if trial.samples_per_s is not None:
        yield _row("samples/s", sparkline(trial.rates, spark), _number(trial.samples_per_s), width)
    if trial.loss is not None:
        yield _row("loss", sparkline(trial.losses, spark), f"{trial.loss:.4g}", width)
    yield from _phases(trial.phases, width)
    for host in trial.hosts:
        yield from _host(host, width)
    if trial.ranks:
        lines = height - _FIXED_LINES - len(trial.hosts)
        yield _ranks(trial.ranks, max(_FEWEST_RANK_LINES, lines))
    if trial.straggler:
        yield Text(f"straggler: {trial.straggler}", style="yellow")


def _progress(trial: TrialView, width: int) -> RenderableType:
    words = f"{_steps(trial)} steps"
    if trial.epoch is not None:
        words += f", epoch {trial.epoch + 1}"
    line = Table.grid(padding=(0, 1, 0, 0))
    line.add_column(width=_LABEL - 1)
    if trial.steps_planned is not None:
        line.add_column(width=max(10, width - _LABEL - len(words) - 2))
        bar = ProgressBar(total=trial.steps_planned, completed=trial.steps)
        line.add_row("steps", bar, words)
    else:
        line.add_row("steps", words)
    return line


def _row(label: str, line: str, value: str, width: int) -> Text:
    text = Text(label.ljust(_LABEL), style="")
    text.append(line, style="cyan")
    text.append(value.rjust(width - _LABEL - len(line)), style="bold")
    return text


def _phases(phases: Mapping[str, float | None], width: int) -> Iterator[Text]:
    """Yield a bar of the parts of a step, and their names."""
    shares = _shares(phases)
    if not shares:
        return
    bar, parts = Text("a step".ljust(_LABEL)), []
    columns = width - _LABEL
    done = 0.0
    for name, share in shares.items():
        word, colour, shade = _PHASES[name]
        begin, done = round(done * columns), done + share
        bar.append(shade * (round(done * columns) - begin), style=colour)
        if share >= _LEAST_SHARE:
            parts.append(Text.assemble((shade, colour), f" {word} {share:.0%}"))
    yield bar
    yield from _folded("", parts, width)


def _host(host: HostView, width: int) -> Iterator[Text]:
    parts = [Text(word) for word in _host_parts(host)]
    if host.gaps:
        parts.append(Text(f"{host.gaps} gap{'s' if host.gaps > 1 else ''} in the trace", "yellow"))
    yield from _folded(host.host, parts, width)


def _folded(label: str, parts: Sequence[Text], width: int) -> Iterator[Text]:
    """Distribute the parts over lines without breaking one."""
    line = Text(label[: _LABEL - 1].ljust(_LABEL))
    for part in parts:
        if line.cell_len + part.cell_len > width and line.cell_len > _LABEL:
            line.rstrip()
            yield line
            line = Text(" " * _LABEL)
        line.append_text(part).append("  ")
    line.rstrip()
    yield line


def _host_parts(host: HostView) -> Iterator[str]:
    sample = host.sample
    if sample.get("cpu_busy_percent") is not None:
        yield f"CPU {sample['cpu_busy_percent']:.0f}%"
        yield f"idle {sample['cpu_idle_percent'] or 0:.0f}%"
        yield f"IOWait {sample['cpu_iowait_percent'] or 0:.1f}%"
    used, size = sample["ram_used_bytes"] / _GIB, sample["ram_total_bytes"] / _GIB
    yield f"RAM {used:.1f}/{size:.1f} GiB"
    yield f"threads {sample['run_threads']}"
    if sample.get("pressure_cpu_percent") is not None:
        yield f"CPU pressure {sample['pressure_cpu_percent']:.0f}%"


def _ranks(ranks: Sequence[RankView], lines: int) -> RenderableType:
    """Return the table of ranks; if there are too many, those that compute longest."""
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("rank", justify="right")
    table.add_column("host", no_wrap=True, overflow="ellipsis", max_width=16)
    for heading in ("steps", "ms/step", "waiting", "CPU %", "MiB", "threads"):
        table.add_column(heading, justify="right")
    table.add_column("", no_wrap=True)
    shown = sorted(ranks, key=_own_time, reverse=True)[:lines] if len(ranks) > lines else ranks
    for rank in sorted(shown, key=lambda r: r.rank):
        table.add_row(*_rank_cells(rank))
    if len(shown) == len(ranks):
        return table
    return Group(table, Text(f"and {len(ranks) - len(shown)} ranks that compute less", "dim"))


def _own_time(rank: RankView) -> float:
    return (rank.step_s or 0.0) * (1 - (rank.waiting_share or 0.0))


def _rank_cells(rank: RankView) -> tuple[str | Text, ...]:
    sample = rank.sample
    cpu = memory = threads = _UNKNOWN
    if sample is not None:
        cpu = _UNKNOWN if sample["cpu_percent"] is None else f"{sample['cpu_percent']:.0f}"
        memory = f"{(sample['pss_bytes'] or sample['rss_bytes']) / _MIB:.0f}"
        threads = str(sample["threads"])
    style = {"failed": "red", "done": "green"}.get(rank.state, "dim")
    return (
        str(rank.rank),
        rank.host or _UNKNOWN,
        str(rank.steps),
        _UNKNOWN if rank.step_s is None else _number(1000 * rank.step_s),
        _UNKNOWN if rank.waiting_share is None else f"{rank.waiting_share:.0%}",
        cpu,
        memory,
        threads,
        Text("" if rank.state == "running" else rank.state, style=style),
    )


def _shares(phases: Mapping[str, float | None]) -> dict[str, float]:
    """Return each phase's share of a step, in the order of `_PHASES`."""
    known = {name: value for name in _PHASES if (value := phases.get(name))}
    whole = sum(known.values())
    return {name: value / whole for name, value in known.items()} if whole > 0 else {}


def _waiting(phases: Mapping[str, float | None]) -> dict[str, float]:
    """Return the shares of a step that are spent on other ranks, in one word each."""
    shares = _shares(phases)
    named = {"waiting": ("comm_wait", "bubble"), "transfer": ("comm_transfer",)}
    found = {word: sum(shares.get(n, 0.0) for n in names) for word, names in named.items()}
    return {word: share for word, share in found.items() if share >= _LEAST_SHARE}


def _steps(trial: TrialView) -> str:
    return (
        str(trial.steps) if trial.steps_planned is None else f"{trial.steps}/{trial.steps_planned}"
    )


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
