"""Short names of configurations, the same in every table and figure.

A name states launcher, transport, local strategy and layout. Other differences are added only where
two configurations would have the same name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from paceline.analysis.trial.configuration import DOT

if TYPE_CHECKING:
    from paceline.analysis.compare.row import Row

SEPARATOR = f" {DOT} "
NO_TRANSPORT = "none"
_SHARED_MEMORY = "shared"


def short_name(row: Row, among: Sequence[Row]) -> str:
    """Return for example `mpi · mpi · processes 2x1`.

    among: all rows of the comparison, from which the name must distinguish this one.
    """
    launcher = [row.launcher]
    if row.transport != NO_TRANSPORT:
        launcher.append(row.transport)
    return SEPARATOR.join([*launcher, strategy_name(row, among)])


def strategy_name(row: Row, among: Sequence[Row]) -> str:
    """Return strategy and layout, for example `processes 2x1`, without launcher and transport."""
    return SEPARATOR.join([_numbered(row), *distinctions(row, among)])


def distinctions(row: Row, among: Sequence[Row]) -> list[str]:
    """List the options that distinguish a row beyond its strategy and layout."""
    return [*(d for d in row.details if d in _needed(row, among)), *row.labels]


def local_name(row: Row, among: Sequence[Row]) -> str:
    """Name a strategy under launcher `local`, with its transport unless it is shared memory."""
    over = "" if row.transport in (NO_TRANSPORT, _SHARED_MEMORY) else f" over {row.transport}"
    return strategy_name(row, among) + over


def is_single(row: Row) -> bool:
    """Tell whether one rank with one thread runs on one node, so that no layout needs a word."""
    return row.nodes == row.replicas_per_node * row.stages == row.threads_per_worker == 1


def _numbered(row: Row) -> str:
    return row.local_strategy if is_single(row) else f"{row.local_strategy} {row.layout}"


def _needed(row: Row, among: Sequence[Row]) -> set[str]:
    """Return the details that differ among the rows with the same name in one workload."""
    same = [o.details for o in among if _plain(o) == _plain(row) and o.workload == row.workload]
    everywhere = set(row.details).intersection(*same)
    return set(row.details) - everywhere


def _plain(row: Row) -> tuple[str, ...]:
    return (row.launcher, row.transport, _numbered(row), *row.labels)
