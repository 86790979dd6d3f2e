"""The samples of a training: their order, the task that uses them, and where they are read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.base.errors import DataError, UsageError
from paceline.collectives.node.memory import NodeShare, of_first
from paceline.plan.trials.sample_order import SampleOrder, sample_order_of
from paceline.plan.trials.trial import Training, Trial
from paceline.train.data.batches import Feed, FeedOptions, Source, open_feed
from paceline.train.data.dataset import Dataset, node_folder, open_dataset
from paceline.train.data.items import ItemSource, virtual_row_groups
from paceline.train.data.row_groups import ParquetSource
from paceline.train.training.task import Task
from paceline.train.workloads.build import informed, task_of

_DROP_S = 300.0  # for the first rank of a node to drop a data set from memory


@dataclass(frozen=True, slots=True)
class Samples:
    """The samples of a training. held_out: the source of those to evaluate on, if it is another
    one."""

    order: SampleOrder
    task: Task
    source: Source
    held_out: Source | None = None

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
        if self.held_out is None:
            source, order = self.source, self.order.held_out()
        else:
            source, order = self.held_out, self.order.of_whole(self.held_out.row_group_rows)
        return open_feed(source, order, options, mode=trial.training.reading)


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
    held_out = None if training.evaluation is None else training.evaluation.held_out_data
    if training.items is not None:
        order = sample_order_of(training, virtual_row_groups(training.items))
        task = task_of(training, classes=0, steps=order.steps, folder=folder)
        items = task.dataset()
        if items is None:
            raise UsageError(f"{type(task).__name__}.dataset(): expected a data set, got None")
        source = ItemSource(items, training.items)
        others: Source | None = None
        if held_out is not None:
            own = task.held_out_dataset(held_out)
            others = _fitting(ItemSource(own, len(own)), source, held_out)
        yield Samples(order, informed(task, source, 0), source, others)
        return
    check_files = share_of_node.local_rank == 0
    dataset = open_dataset(training.dataset, check_files=check_files)
    if training.reading == "cold":
        if check_files:
            dataset.drop_from_memory()
        of_first(share_of_node, "dropped", _DROP_S, "cold")  # the others read after that
    order = sample_order_of(training, dataset.row_group_rows)
    task = task_of(training, classes=0, steps=order.steps, folder=folder)
    classes = dataset.field(task.target_field).classes or 0
    with ExitStack() as stack:

        def parquet(opened: Dataset, key: str) -> ParquetSource:
            copies = stack.enter_context(
                node_folder(opened.location, share_of_node, training.cache, key)
            )
            return ParquetSource(
                opened.with_copies(copies),
                task.input_field,
                task.target_field,
                image_size=training.image_size,
            )

        read = parquet(dataset, "folder")
        if held_out is None:
            yield Samples(order, informed(task, read, classes), read)
            return
        other = open_dataset(held_out, check_files=check_files)
        if other.classes != dataset.classes:
            raise DataError(
                f"{other.name}: expected the classes of {dataset.name}, "
                f"{', '.join(dataset.classes) or 'none'}, got {', '.join(other.classes) or 'none'}"
            )
        evaluated = _fitting(parquet(other, "held-out folder"), read, other.name)
        yield Samples(order, informed(task, read, classes), read, evaluated)


def _fitting(held_out: Source, source: Source, name: str) -> Source:
    """Return a source to evaluate on; raise DataError if its samples have other shapes."""
    found = [(values.shape, values.dtype) for values in (held_out.inputs, held_out.targets)]
    wanted = [(values.shape, values.dtype) for values in (source.inputs, source.targets)]
    for what, got, expected in zip(("inputs", "targets"), found, wanted, strict=True):
        if got != expected:
            raise DataError(
                f"{name}: expected {what} as those to train on, {expected[1]} of shape "
                f"{expected[0]}, got {got[1]} of shape {got[0]}"
            )
    return held_out
