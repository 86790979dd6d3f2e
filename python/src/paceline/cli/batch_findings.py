"""Result of `tune batch` as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from paceline.cli.console import plain_console
from paceline.report.wording import number

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from paceline.tune.batch import BatchFinding
    from paceline.tune.batch.training import Trained

_MIB = 2**20
_COLUMNS = ("batch", "predicted", "measured", "ratio", "samples/s", "")


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
                f"{probe.predicted_bytes / _MIB:.0f} MiB",
                "" if measured is None else f"{measured / _MIB:.0f} MiB",
                "" if measured is None else f"{probe.predicted_bytes / measured:.2f}",
                "" if speed is None else f"{speed:.3g}",
                "" if measured is not None else "does not fit",
            )
            table.add_row(*map(Text, row))
        console.print(table)
        console.print()
        if each.trained:
            _print_trained(console, each)
    console.print("Peak memory of the ranks of a node, without pages of files.")


def _print_trained(console: Console, found: BatchFinding) -> None:
    """Print the trainings of a configuration: quality and time to the target."""
    target = found.target
    metrics = list(dict.fromkeys(name for row in found.trained for name in row.metrics))
    if target is not None:
        metrics = [name for name in metrics if name == target.metric]
    table = Table(box=None, pad_edge=False)
    for column in ("batch", "scaling", "rate", "samples/s", *metrics):
        table.add_column(column, justify="left" if column == "scaling" else "right")
    for column in () if target is None else ("to target", "samples", "reached", ""):
        table.add_column(column, justify="right")
    for row in found.trained:
        cells = [str(row.global_batch), row.scaling, f"{row.learning_rate:.3g}"]
        if row.reason is None:
            cells.append(number(row.samples_per_s))
            cells += [number(row.metrics.get(name)) for name in metrics]
            cells += [] if target is None else _to_target(row)
        else:
            cells.append("no memory")
        table.add_row(*map(Text, cells))
    wanted = "" if target is None else f", {target.words}"
    console.print(Text(f"Training with these batch sizes{wanted}:"))
    console.print(table)
    if any(row.is_fastest for row in found.trained):
        console.print("* fastest to the target, or not significantly slower")
    console.print()


def _to_target(row: Trained) -> list[str]:
    time_s, samples = row.time_to_target_s, row.samples_to_target
    return [
        "missed" if time_s is None else f"{number(time_s)} s",
        "" if samples is None else f"{samples:.0f}",
        f"{row.target_reached} of {row.repeats}",
        "*" if row.is_fastest else "",
    ]


def _largest(found: BatchFinding) -> str:
    if found.largest_batch is None:
        return "no batch fits"
    limit = "memory" if found.limited_by == "memory" else "the samples of the data set"
    return f"at most {found.largest_batch}, limited by {limit}"
