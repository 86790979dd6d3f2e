"""Short names of configurations, the same in every table and figure.

A name says launcher, transport, local strategy and its numbers; what else two configurations differ
in is said only where they would otherwise have one name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.analysis.row import Row

TIMES, DOT = "\N{MULTIPLICATION SIGN}", "\N{MIDDLE DOT}"
SEPARATOR = f" {DOT} "
NAME_WIDTH = 27  # of a narrow table; longer names go on in the line that the interval is in


def short_name(row: Row, among: Sequence[Row]) -> str:
    """`mpi · mpi · processes 2x1`: launcher, transport, local strategy and its numbers.

    among: all rows of the comparison, from which the name must tell this one.
    """
    launcher = [row.launcher] if row.transport == "none" else [row.launcher, row.transport]
    return SEPARATOR.join([*launcher, strategy_name(row, among)])


def strategy_name(row: Row, among: Sequence[Row]) -> str:
    """What a node does, without launcher and transport.

    `threads 2x1` and `processes 2x1`: replicas x threads of each. `pipeline 2x1 m8`: stages x
    threads, micro-batches. `hybrid 2·2x1 m8`: replicas · stages x threads. `intraop 1x2`. Several
    nodes stand before: `processes 3x2x1`.
    """
    clashing = [other for other in among if _plain(other) == _plain(row)]
    shown = [
        text
        for detail in _DETAILS
        if _differs(detail, clashing) and (text := detail(row)) is not None
    ]
    return SEPARATOR.join([_numbered(row), *shown, *_unusual(row)])


def folded(name: str, width: int = NAME_WIDTH) -> str:
    """In lines of that width, broken between the name's parts only."""
    lines = [""]
    for part in name.split(SEPARATOR):
        longer = f"{lines[-1]}{SEPARATOR}{part}" if lines[-1] else part
        if len(longer) <= width:
            lines[-1] = longer
        else:
            lines.append(f"  {part}")
    return "\n".join(lines)


def local_name(row: Row, among: Sequence[Row]) -> str:
    """A strategy under launcher `local`, with its transport where that is no shared memory."""
    over = "" if row.transport in ("none", "shared") else f" over {row.transport}"
    return strategy_name(row, among) + over


def _numbered(row: Row) -> str:
    nodes = f"{row.nodes}{TIMES}" if row.nodes > 1 else ""
    each = f"{TIMES}{row.threads_per_worker}"
    micro_batches = "" if row.micro_batches is None else f" m{row.micro_batches}"
    if row.stages > 1 and row.replicas_per_node > 1:
        workers = f"{row.replicas_per_node}{DOT}{row.stages}"
    else:
        workers = str(row.replicas_per_node * row.stages)
    if workers == "1" and row.threads_per_worker == row.nodes == 1:
        return row.local_strategy
    return f"{row.local_strategy} {nodes}{workers}{each}{micro_batches}"


def _unusual(row: Row) -> list[str]:
    """What sets a configuration apart beyond launcher, transport, strategy and placement."""
    found = []
    if row.device != "cpu":
        found.append(row.device)
    if row.precision != "fp32":
        found.append(row.precision)
    if row.memory_format != "contiguous":
        found.append(row.memory_format)
    if row.bucket_mb != 25:
        found.append(f"{row.bucket_mb:g} MB buckets")
    if row.buckets_in_flight is not None:
        found.append(f"{row.buckets_in_flight} at once")
    if row.algorithm not in (None, "auto"):
        found.append(str(row.algorithm))
    if row.compression is not None:
        found.append(f"send {row.compression}")
    if row.averaging is not None:
        found.append(f"average {row.averaging}")
    found += [f"{name}={value}" for name, value in row.mpi_parameters]
    return found


def _plain(row: Row) -> tuple[str, ...]:
    return (row.launcher, row.transport, _numbered(row), *_unusual(row))


def _differs(detail: Callable[[Row], str | None], rows: Sequence[Row]) -> bool:
    """Whether rows of any one workload differ: other workloads have other tables."""
    seen: dict[str, set[str | None]] = {}
    for row in rows:
        seen.setdefault(row.workload, set()).add(detail(row))
    return any(len(found) > 1 for found in seen.values())


def _where_cut(row: Row) -> str | None:
    if row.split_points is None:
        return row.balance
    return f"cut {', '.join(map(str, row.split_points))}"


# what may set apart configurations of one name
_DETAILS: tuple[Callable[[Row], str | None], ...] = (
    lambda row: row.schedule,
    _where_cut,
    lambda row: row.reduction,
)
