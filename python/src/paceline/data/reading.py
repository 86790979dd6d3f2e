"""Open the feed of a rank: the samples of the sample order, in either mode."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.data.batches import Augment, Batch, Feed, FeedOptions, mirror_at_random
from paceline.data.memory_feed import MemoryFeed
from paceline.data.node import NodeShare, SoloNode
from paceline.data.stream_feed import StreamFeed
from paceline.errors import UsageError

if TYPE_CHECKING:
    from paceline.data.dataset import Dataset
    from paceline.plan.sample_order import SampleOrder
    from paceline.spec.values import ReadingMode

__all__ = ["Batch", "Feed", "NodeShare", "SoloNode", "open_feed"]


def open_feed(  # noqa: PLR0913  (the only place that needs all of them)
    dataset: Dataset,
    order: SampleOrder,
    *,
    mode: ReadingMode,
    image_size: int,
    rank: int,
    world_size: int,
    pixels: bool = True,
    augment: Augment = mirror_at_random,
    share_of_node: NodeShare | None = None,
    decode_threads: int = 1,
    prefetch_batches: int = 2,
    timeout_s: float = 1800.0,
) -> Feed:
    """Return the batches of `rank`, one for each step of `order`.

    `memory` decodes every image that the training uses before it returns, once per node, and first
    checks that they fit. `stream` starts at once and keeps two shuffle windows of encoded images.
    Both modes give the same samples and the same pixels. Without `pixels`, batches contain only
    sample ids and labels, for pipeline stages after the first. augment: random transform of an
    image. timeout_s: how long ranks wait for each other to decode. Disables OpenCV's own threads in
    this process.
    Raises UsageError for values that cannot work, EnvironmentLacks if the memory is too small,
    DataError (also while iterating) if a file is damaged or differs from the manifest.
    """
    if tuple(order.row_group_rows) != dataset.row_group_rows:
        raise UsageError(
            f"{dataset.path}: the sample order has other row groups than this data set; make it "
            "from dataset.row_group_rows"
        )
    if not 0 <= rank < world_size:
        raise UsageError(f"rank: expected 0..{world_size - 1}, got {rank} of {world_size}")
    options = FeedOptions(
        image_size, rank, world_size, decode_threads, prefetch_batches, pixels, augment
    )
    if mode == "memory":
        return MemoryFeed(dataset, order, options, share_of_node or SoloNode(), timeout_s)
    return StreamFeed(dataset, order, options)
