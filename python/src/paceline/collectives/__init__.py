"""Exchange of tensors between ranks: imports nothing else of Paceline, so that it can be a wheel.

The way of a tensor through `all_reduce` (read `shared_group.SharedMemoryGroup.allreduce` first):

1. torch calls a method of a process group (`shared_group`, `mpi.process_group`, `gloo_group`).
2. `recorder` notes the operation, and `work` carries it out in this thread or in one of its own.
3. `buffers` presents the tensor as flat memory of the host, and has the arithmetic.
4. `shared_memory` reduces it within a host (over `node`), then between hosts (Gloo).
5. The result is copied back, the work ends, and the recorder reports the operation after the step.

Before that, `store` connects the ranks. After a failure, `liveness` finds out who is missing.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

BACKEND = "paceline"
_DEVICES = ["cpu", "cuda"]  # gloo_group.DEVICES, which may not be loaded here


def register() -> None:
    """Make back end "paceline" known to torch, unless it is.

    torch calls this while it is imported: entry point `torch.backends` of this package. So nothing
    more is loaded before the first group is created.
    """
    import torch.distributed as dist  # noqa: PLC0415  (see above)

    if dist.is_available() and not hasattr(dist.Backend, BACKEND.upper()):
        create = _create_group
        dist.Backend.register_backend(BACKEND, create, extended_api=True, devices=_DEVICES)


def _create_group(given: Any, options: Any) -> Any:
    """Create a group; torch calls this for each group with this rank.

    In the wheel of its own this package has another name (python/collectives). Where Paceline is
    installed as well, groups are Paceline's, in any order of registration: it records them, and
    has the errors that they raise.
    """
    try:
        room = import_module("paceline.collectives").__name__
    except ModuleNotFoundError:
        room = __name__
    return import_module(f"{room}.shared_group").create_group(given, options)
