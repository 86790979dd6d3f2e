"""`paceline profile` for the terminal: fits 80 columns."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from paceline.report.communication import (
    check_sentence,
    clock_sentence,
    per_step,
    sent_sentences,
    size_words,
    straggler_sentence,
)
from paceline.report.wording import NOT_MEASURED, in_milliseconds, number

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from paceline.analysis.communication import RankCommunication, TrialCommunication

_NAMES = {"trial", "host", "operation"}  # columns of text; numbers have priority
_NOT_RECORDED = (
    "No operation was recorded (ranks/*/communication.jsonl): the transport does not record. "
    "The following values come from the steps."
)


def profile_view(profile: TrialCommunication) -> RenderableType:
    """Show one trial: ranks, operations, the straggler, and whether the sums agree."""
    parts: list[RenderableType] = [Text(_title(profile), style="bold")]
    if not profile.operations_recorded:
        parts.append(Text(_NOT_RECORDED, style="yellow"))
    parts += [Text("\nA step of each rank, ms"), _rank_table(profile)]
    if profile.operations_recorded:
        heading = "\nOperations in a step of a rank, mean over the ranks; times in ms"
        parts += [Text(heading), _operation_table(profile)]
    parts.append(Text(""))
    for found in profile.stragglers:
        style = "bold" if found.straggler is not None else ""
        parts.append(Padding(Text(straggler_sentence(found), style=style), (0, 0, 1, 0)))
    lines = [clock_sentence(profile), *sent_sentences(profile.bins)]
    parts += [Text(line, style="dim") for line in lines]
    for check in profile.checks:
        parts.append(Text(check_sentence(check), style="dim" if check.passed else "yellow"))
    return Group(*parts)


def overview(profiles: Sequence[TrialCommunication]) -> RenderableType:
    """Show one line for each trial: means over its ranks, in milliseconds per step."""
    table = _table("trial", "step\nms", "waiting\nms", "transfer\nms", "straggler\nms a step")
    for profile in profiles:
        count = len(profile.ranks)
        named = [
            f"rank {s.straggler}: {number(1000 * s.ranks[0].delay_s.mean, 2)}"
            for s in profile.stragglers
            if s.straggler is not None
        ]
        table.add_row(
            profile.trial,
            in_milliseconds(sum(r.step_s for r in profile.ranks) / count),
            in_milliseconds(sum(r.phases_s["comm_wait"] or 0.0 for r in profile.ranks) / count),
            in_milliseconds(sum(r.phases_s["comm_transfer"] or 0.0 for r in profile.ranks) / count),
            ", ".join(named) or NOT_MEASURED,
        )
    return table


def _title(profile: TrialCommunication) -> str:
    steps = max(rank.steps for rank in profile.ranks)
    return f"{profile.trial}\n{steps} steps after the warm-up, {len(profile.ranks)} ranks"


def _rank_table(profile: TrialCommunication) -> Table:
    has_bubble = any(rank.phases_s["bubble"] is not None for rank in profile.ranks)
    columns = ["rank", "host", "step", "compute", *(["bubble"] if has_bubble else [])]
    columns += ["waiting", "transfer"]
    if profile.operations_recorded:
        columns += ["over-\nlapped", "be-\ntween"]
    table = _table(*columns)
    for rank in profile.ranks:
        table.add_row(*_rank_cells(rank, has_bubble, profile.operations_recorded))
    return table


def _rank_cells(rank: RankCommunication, has_bubble: bool, recorded: bool) -> list[str]:
    cells = [
        str(rank.rank),
        rank.host or NOT_MEASURED,
        in_milliseconds(rank.step_s),
        in_milliseconds(rank.compute_s),
    ]
    if has_bubble:
        cells.append(in_milliseconds(rank.phases_s["bubble"]))
    cells += [
        in_milliseconds(rank.phases_s["comm_wait"]),
        in_milliseconds(rank.phases_s["comm_transfer"]),
    ]
    if recorded:
        cells += [in_milliseconds(rank.overlapped_s), in_milliseconds(rank.between_s)]
    return cells


def _operation_table(profile: TrialCommunication) -> Table:
    table = _table(
        "operation", "size", "num-\nber", "MB", "wait-\ning", "trans-\nfer", "ex-\nposed",
        "over-\nlapped", "GB/s",
    )  # fmt: skip
    for each in profile.bins:
        cells = per_step(each, profile)
        name = each.operation if each.algorithm is None else f"{each.operation} {each.algorithm}"
        names = ("count", "megabytes", "wait_ms", "transfer_ms", "exposed_ms", "overlapped_ms")
        table.add_row(
            name,
            size_words(each),
            *(number(cells[column]) for column in names),
            number(cells["bandwidth"]),
        )
    return table


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for column in columns:
        if column in _NAMES:
            table.add_column(column, overflow="fold", ratio=1)
        else:
            widest = max(map(len, column.split("\n")))
            table.add_column(column, justify="right", no_wrap=True, min_width=widest)
    return table
