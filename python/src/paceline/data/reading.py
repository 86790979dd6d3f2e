"""Open the feed of a rank: the samples of the sample order, in either mode."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.data.batches import Augment, Batch, Feed, FeedOptions
from paceline.data.memory_feed import MemoryFeed
from paceline.data.stream_feed import StreamFeed
from paceline.errors import UsageError
from paceline.node.memory import NodeShare, SoloNode

if TYPE_CHECKING:
    from paceline.data.source import Source
    from paceline.plan.sample_order import SampleOrder
    from paceline.spec.values import ReadingMode

__all__ = ["Batch", "Feed", "NodeShare", "SoloNode", "open_feed"]


def open_feed(  # noqa: PLR0913  (the only place that needs all of them)
    source: Source,
    order: SampleOrder,
    *,
    mode: ReadingMode,
    rank: int,
    world_size: int,
    with_inputs: bool = True,
    augment: Augment | None = None,
    augment_target: Augment | None = None,
    share_of_node: NodeShare | None = None,
    decode_threads: int = 1,
    prefetch_batches: int = 2,
    timeout_s: float = 1800.0,
) -> Feed:
    """Return the batches of `rank`, one for each step of `order`.

    `memory` decodes every sample that the training uses before it returns, once per node, and
    first checks that they fit. `stream` starts at once and keeps two shuffle windows of samples as
    they are stored. Both modes give the same samples and the same values.
    Without inputs, batches contain only sample ids and targets, for pipeline stages after the
    first. augment, augment_target: random transforms of an input and of a target. share_of_node:
    the ranks that share the decoded samples. timeout_s: how long ranks wait for each other to
    decode.
    Raises UsageError for values that cannot work, EnvironmentLacks if the memory is too small,
    DataError (also while iterating) if a file is damaged or differs from the manifest.
    """
    if tuple(order.row_group_rows) != tuple(source.row_group_rows):
        raise UsageError(
            "the sample order has other row groups than this data set; make it from the data set's "
            "row_group_rows"
        )
    if not 0 <= rank < world_size:
        raise UsageError(f"rank: expected 0..{world_size - 1}, got {rank} of {world_size}")
    options = FeedOptions(
        rank, world_size, decode_threads, prefetch_batches, with_inputs, augment, augment_target
    )
    if mode == "memory":
        return MemoryFeed(source, order, options, share_of_node or SoloNode(), timeout_s)
    return StreamFeed(source, order, options)
