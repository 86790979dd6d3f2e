"""The samples of a training: their order, the task that uses them, and where they are read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.base.errors import UsageError
from paceline.collectives.node.memory import NodeShare
from paceline.plan.trials.sample_order import SampleOrder, sample_order_of
from paceline.plan.trials.trial import Training, Trial
from paceline.train.data.batches import Feed, FeedOptions, Source, open_feed
from paceline.train.data.dataset import open_dataset
from paceline.train.data.items import ItemSource, virtual_row_groups
from paceline.train.data.node_files import node_folder
from paceline.train.data.row_groups import ParquetSource
from paceline.train.training.task import Task
from paceline.train.workloads.build import informed, task_of


@dataclass(frozen=True, slots=True)
class Samples:
    """The samples of a training."""

    order: SampleOrder
    task: Task
    source: Source

    def since(self, step: int) -> Samples:
        """Return the samples of a training that continues with `step`."""
        return replace(self, order=self.order.since(step))

    def between(self, step: int, stop: int) -> Samples:
        """Return the samples of the steps from `step` to `stop - 1`."""
        return replace(self, order=replace(self.order, first_step=step, max_steps=stop))

    def feed(
        self,
        trial: Trial,
        *,
        rank: int,
        world_size: int,
        with_inputs: bool = True,
        share_of_node: NodeShare | None = None,
    ) -> Feed:
        """Return the batches of a rank; see `open_feed`. rank, world_size: of the replicas."""
        inputs = self.source.inputs
        options = FeedOptions(
            rank,
            world_size,
            trial.placement.threads_per_rank,
            with_inputs,
            augment=self.task.transform_of(inputs.shape, inputs.dtype),
            augment_target=self.task.target_transform(),
        )
        return open_feed(
            self.source,
            self.order,
            options,
            mode=trial.training.reading,
            share_of_node=share_of_node,
            timeout_s=trial.limits.trial_s,
        )

    def held_out_feed(self, trial: Trial, rank: int, world_size: int) -> Feed:
        """Return the held-out samples of a rank, not transformed. world_size: all ranks."""
        options = FeedOptions(rank, world_size, trial.placement.threads_per_rank)
        order = self.order.held_out()
        return open_feed(self.source, order, options, mode=trial.training.reading)


@contextmanager
def open_samples(
    training: Training, folder: Path | None, share_of_node: NodeShare
) -> Iterator[Samples]:
    """Open the data set of a training, and create its task.

    folder: of the trial, if there is one. share_of_node: the ranks with whom copies of remote files
    are shared; the first of them checks that all files are there.
    Raises UsageError if the data set lacks a field of the task, EnvironmentLacks if it is missing
    or cannot be reached, DataError if it is damaged.
    """
    if training.items is not None:
        order = sample_order_of(training, virtual_row_groups(training.items))
        task = task_of(training, classes=0, steps=order.steps, folder=folder)
        items = task.dataset()
        if items is None:
            raise UsageError(f"{type(task).__name__}.dataset(): expected a data set, got None")
        source = ItemSource(items, training.items)
        yield Samples(order, informed(task, source, 0), source)
        return
    dataset = open_dataset(training.dataset, check_files=share_of_node.local_rank == 0)
    order = sample_order_of(training, dataset.row_group_rows)
    task = task_of(training, classes=0, steps=order.steps, folder=folder)
    classes = dataset.field(task.target_field).classes or 0
    with node_folder(dataset.location, share_of_node, training.cache) as copies:
        parquet = ParquetSource(
            dataset.with_copies(copies),
            task.input_field,
            task.target_field,
            image_size=training.image_size,
        )
        yield Samples(order, informed(task, parquet, classes), parquet)
