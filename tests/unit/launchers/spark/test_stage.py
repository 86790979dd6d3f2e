"""The placement that the driver takes from its options, without Spark."""

from __future__ import annotations

import pytest

from paceline.errors import UsageError
from paceline.job.options import parse_options
from paceline.launchers.spark.stage import _placement


def test_ranks_are_divided_among_nodes() -> None:
    options = parse_options("train.py", ["--ranks", "4", "--ranks-per-node", "2"])
    assert _placement(options, local=False) == (4, 2)


@pytest.mark.parametrize("on_node", ["0", "-2", "3"])
def test_number_of_ranks_per_node_that_does_not_divide_is_refused(on_node: str) -> None:
    options = parse_options("train.py", ["--ranks", "4", f"--ranks-per-node={on_node}"])
    expected = f"--ranks-per-node {on_node}: expected a positive divisor of --ranks 4"
    with pytest.raises(UsageError, match=expected):
        _placement(options, local=True)
