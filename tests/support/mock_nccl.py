"""A back end of torch.distributed for the mock GPU. Like NCCL it refuses tensors of the host.

It copies the tensors of the device to the host, and Gloo carries them. Import it in processes with
the device.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from tests.support.mock_gpu import NAME
from torch._C._distributed_c10d import Work, _create_work_from_future
from torch.utils import _pytree

from paceline.collectives.gloo_group import RecordedProcessGroup, create_gloo, register_gloo

BACKEND = "mock-nccl"
# Methods of a process group, and how many of their first arguments have tensors.
_TENSOR_ARGUMENTS = {
    "allreduce": 1,
    "allreduce_coalesced": 1,
    "broadcast": 1,
    "reduce": 1,
    "allgather": 2,
    "_allgather_base": 2,
    "all_gather_single": 2,
    "reduce_scatter": 2,
    "_reduce_scatter_base": 2,
    "reduce_scatter_single": 2,
    "send": 1,
    "recv": 1,
}


class MockNccl(RecordedProcessGroup):
    """A group of ranks with one device each."""


def _with_copies(method: str, count: int) -> Any:
    inner_method = getattr(RecordedProcessGroup, method)

    def call(self: MockNccl, *arguments: Any) -> Work:
        own, spec = _pytree.tree_flatten(arguments[:count])
        for tensor in own:
            if tensor.device.type != NAME:
                raise RuntimeError(
                    f"No backend type associated with device type {tensor.device.type}"
                )
        copies = [tensor.cpu() for tensor in own]
        inner_method(self, *_pytree.tree_unflatten(copies, spec), *arguments[count:]).wait()
        for tensor, copy in zip(own, copies, strict=True):
            with torch.no_grad():
                tensor.copy_(copy)
        done: torch.futures.Future[Any] = torch.futures.Future(devices=[own[0].device])
        done.set_result(own)
        return _create_work_from_future(done)

    return call


for _method, _count in _TENSOR_ARGUMENTS.items():
    setattr(MockNccl, _method, _with_copies(_method, _count))


def _create_group(given: Any, _options: Any) -> MockNccl:
    backend, inner = create_gloo(given, given.store)
    group = MockNccl(inner, given.group_id)
    register_gloo(group, backend)
    return group


dist.Backend.register_backend(BACKEND, _create_group, extended_api=True, devices=[NAME])
