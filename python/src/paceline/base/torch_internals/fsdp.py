"""Names of torch's FSDP 2 without a stable public interface; `import torch` does not load it."""

from __future__ import annotations

from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

__all__ = ["AllGather", "ReduceScatter"]
