"""torch's default process group, opened and closed in the same way for every library."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar

import torch.distributed as dist

from paceline.torch_internals import PrefixStore, abort_process_groups

if TYPE_CHECKING:
    from paceline.plan.rank_context import RankContext
    from paceline.plan.trial import Trial
    from paceline.torch_internals import Store


class DefaultGroupTransport:
    """A transport that opens torch's default process group with one backend."""

    backend: ClassVar[str]

    def __init__(self) -> None:
        self._group: Any = None  # a dist.ProcessGroup

    def open_group(self, context: RankContext, trial: Trial, store: Store, **options: Any) -> None:
        """Open the default process group. options: further ones of `init_process_group`."""
        dist.init_process_group(
            self.backend,
            store=PrefixStore(self.backend, store),
            rank=context.rank,
            world_size=context.world_size,
            timeout=timedelta(seconds=trial.limits.collective_s),
            **options,
        )
        self._group = dist.group.WORLD

    def close(self, *, failed: bool) -> None:
        """Destroy all process groups; a second call does nothing.

        After a failure, the operations of all groups are given up, because their peers may be gone:
        a group that has not failed itself would wait for them.
        """
        if not dist.is_initialized():
            return
        if failed:
            abort_process_groups()
        else:
            dist.destroy_process_group()
