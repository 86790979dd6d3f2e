"""Names of torch without a stable public interface, checked with torch 2.13: the only place for
those of torch.distributed."""

from __future__ import annotations

from torch._C._autograd import _profiler_enabled as profiler_enabled
from torch._C._distributed_c10d import (
    HashStore,
    PrefixStore,
    ProcessGroupGloo,
    Store,
    TCPStore,
    Work,
)
from torch.distributed.distributed_c10d import _abort_process_group as abort_process_groups

__all__ = [
    "HashStore",
    "PrefixStore",
    "ProcessGroupGloo",
    "Store",
    "TCPStore",
    "Work",
    "abort_process_groups",
    "profiler_enabled",
]
