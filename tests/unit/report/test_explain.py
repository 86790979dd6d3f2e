"""The overview of a run's differences names each configuration, whichever has the shorter mean."""

from __future__ import annotations

import dataclasses
import io
from typing import TYPE_CHECKING

from rich.console import Console

from paceline.analysis.compare import compare_run
from paceline.analysis.explain.run import explain_workload
from paceline.report.explain import name_in, overview

if TYPE_CHECKING:
    from pathlib import Path
    from types import ModuleType


def test_other_configuration_is_named_also_where_its_mean_is_shorter(
    fabricate: ModuleType, tmp_path: Path
) -> None:
    run = fabricate.make_run(
        tmp_path, [fabricate.SEQUENTIAL, fabricate.MPI], repeats=3, jitter=0.01
    )
    comparison = compare_run(run)
    (found,) = explain_workload(comparison, "tiny")
    reference = comparison.verdicts["tiny"].best
    assert reference == found.faster
    reversed_ = dataclasses.replace(found, faster=found.slower, slower=found.faster)
    lines = []
    for each in (found, reversed_):
        console = Console(file=io.StringIO(), width=80)
        console.print(overview([each], reference, name_in(comparison)))
        (heading, *_, row) = console.file.getvalue().rstrip().splitlines()
        assert heading.startswith("Steps compared with those of mpi · mpi · processes 2")
        assert row.startswith("local · sequential ")
        lines.append(row.split()[3:7])
    (more, low, _, high), (less, *bounds) = lines
    assert float(more) > 0
    assert [less, *bounds] == [f"-{more}", f"-{high}", "to", f"-{low}"]
