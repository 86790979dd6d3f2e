"""Result of `tune batch` as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from paceline.cli.console import plain_console

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.tune.batch import BatchFinding

_MIB = 2**20
_COLUMNS = ("batch", "memory", "samples/s", "")


def print_batch_findings(found: Sequence[BatchFinding]) -> None:
    """Print a table for each configuration: memory and speed of each batch size."""
    console = plain_console()
    for each in found:
        console.print(Text(f"{each.configuration}: {_largest(each)}"))
        table = Table(box=None, pad_edge=False)
        for column in _COLUMNS:
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
