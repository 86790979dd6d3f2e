"""The sample order of a planned training, on the data set that it names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.data.dataset import open_dataset
from paceline.data.items import virtual_row_groups
from paceline.plan.sample_order import SampleOrder, sample_order_of

if TYPE_CHECKING:
    from paceline.plan.trial import Training


def order_of(training: Training) -> SampleOrder:
    """Return the order of the samples; reads no sample. Raises as `open_dataset`."""
    if training.items is not None:
        return sample_order_of(training, virtual_row_groups(training.items))
    return sample_order_of(training, open_dataset(training.dataset).row_group_rows)
