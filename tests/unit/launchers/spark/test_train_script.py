"""The placement that spark-jobs/train.py takes from its options, without Spark."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from paceline.errors import UsageError
from paceline.job.options import parse_options

if TYPE_CHECKING:
    from types import ModuleType

SCRIPT = Path(__file__).resolve().parents[4] / "spark-jobs" / "train.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("spark_train", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_ranks_are_divided_among_nodes(script: ModuleType) -> None:
    options = parse_options("train.py", ["--ranks", "4", "--ranks-per-node", "2"])
    assert script._placement(options, local=False) == (4, 2)


@pytest.mark.parametrize("on_node", ["0", "-2", "3"])
def test_number_of_ranks_per_node_that_does_not_divide_is_refused(
    script: ModuleType, on_node: str
) -> None:
    options = parse_options("train.py", ["--ranks", "4", f"--ranks-per-node={on_node}"])
    expected = f"--ranks-per-node {on_node}: expected a positive divisor of --ranks 4"
    with pytest.raises(UsageError, match=expected):
        script._placement(options, local=True)
