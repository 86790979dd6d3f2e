"""Names of torch's FSDP 2 without a stable public interface; `import torch` does not load it."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.nn import Parameter

__all__ = ["AllGather", "ReduceScatter", "unsharded_parameters"]


def unsharded_parameters(model: nn.Module) -> Iterator[tuple[Parameter, Parameter]]:
    """Yield each sharded parameter with the whole one that forward passes use, if there is one."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
            for group in groups:
                for each in () if group is None else group.fsdp_params:
                    whole = getattr(each, "_unsharded_param", None)
                    if whole is not None:
                        yield each.sharded_param, whole
