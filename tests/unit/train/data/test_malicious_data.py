"""A malicious pickle in place of Petastorm's schema is never executed by Paceline."""

from __future__ import annotations

import builtins
import pickle
from pathlib import Path
from typing import Any

import pytest
from petastorm.etl.dataset_metadata import get_schema_from_dataset_url

from paceline.plan.trials.sample_order import SampleOrder
from paceline.train.data.batches import FeedOptions, open_feed
from paceline.train.data.dataset import inspect_dataset, open_dataset
from paceline.train.data.row_groups import ParquetSource

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # Petastorm on pyarrow 14


class Call:
    """Pickles as a call of `eval`, which Petastorm's own guard allows (uber/petastorm#741)."""

    def __init__(self, expression: str) -> None:
        self.expression = expression

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return builtins.eval, (self.expression,)


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    """The file that the malicious pickle creates."""
    return tmp_path / "executed"


@pytest.fixture
def malicious(dataset_of_rows: Any, mark: Path) -> Path:
    attack = pickle.dumps(Call(f"open({str(mark)!r}, 'w')"))
    path: Path = dataset_of_rows(3, 3, schema_pickle=attack).path
    return path


def test_petastorms_own_reader_executes_it(malicious: Path, mark: Path) -> None:
    """The control: the pickle works, and lies where Petastorm looks for it."""
    with pytest.raises(Exception):  # noqa: B017, PT011  (Petastorm fails later in any way)
        get_schema_from_dataset_url(f"file://{malicious}").fields  # noqa: B018
    assert mark.exists()


def test_inspect_does_not_execute_it(malicious: Path, mark: Path) -> None:
    assert inspect_dataset(malicious)["samples"] == 6
    assert not mark.exists()


@pytest.mark.parametrize("mode", ["memory", "stream"])
def test_training_does_not_execute_it(malicious: Path, mark: Path, mode: Any) -> None:
    order = SampleOrder(row_group_rows=(3, 3), seed=0, global_batch=6, epochs=1)
    source = ParquetSource(open_dataset(malicious), "image", "label", image_size=16)
    with open_feed(source, order, FeedOptions(0, 1), mode=mode) as feed:
        assert [len(batch.sample_ids) for batch in feed] == [6]
    assert not mark.exists()
