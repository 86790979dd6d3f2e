"""NCCL, NVIDIA's library for communication between GPUs; each rank has one GPU.

NCCL works asynchronously. A thread of torch (the watchdog) notices a collective that fails or
exceeds its limit. Unless the program is inside a call at that moment, the watchdog ends the process
with the reason on stderr. This is intended: nothing else can wake what waits in a GPU's queue.
"""

from __future__ import annotations

import os
import re
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from paceline.errors import EnvironmentLacks, PacelineError
from paceline.training.devices import device_name, device_of, use_device
from paceline.transports.base import PeerLost
from paceline.transports.interfaces import check_interface, time_out_of

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from paceline.plan.trial import Trial
    from paceline.training.context import RankContext

# Texts of torch and NCCL (ProcessGroupNCCL.cpp, NCCLUtils.cpp; ncclResult_t in NCCL's manual)
_PEER_LOST = re.compile(
    r"ncclRemoteError|remote process exit|communicator was aborted|connection (closed|reset)",
    re.IGNORECASE,
)
_SAME_GPU = re.compile(r"duplicate gpu", re.IGNORECASE)
# Both are torch's defaults. With other values from the user's environment nothing would end a wait
# in a GPU's queue (ProcessGroupNCCL.hpp).
_END_PROCESS = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3", "TORCH_NCCL_BLOCKING_WAIT": "0"}


class NcclTransport:
    """All-reduce among GPUs: within a node over NVLink or PCIe, between nodes over the network."""

    name = "nccl"

    def __init__(self) -> None:
        self._rank = 0
        self._limit_s = 0.0
        self._interface = ""
        self._device = torch.device("cpu")

    def open(self, context: RankContext, trial: Trial, store: Store) -> None:
        self._rank, self._limit_s = context.rank, trial.limits.collective_s
        self._interface = trial.interface
        if not dist.is_nccl_available():
            raise EnvironmentLacks(
                f"host {context.host}: transport nccl needs a torch with NCCL, torch "
                f"{torch.__version__} is built without; install the same version's CUDA build "
                "(pytorch.org, Get Started), or use transport gloo"
            )
        check_interface(trial.interface, context.host, "NCCL")
        self._device = device_of(trial, context)
        use_device(self._device)
        # "=" selects exactly this interface instead of a prefix (NCCL's manual)
        os.environ.update(_END_PROCESS, NCCL_SOCKET_IFNAME=f"={trial.interface}")
        try:
            dist.init_process_group(
                "nccl",
                store=PrefixStore("nccl", store),
                rank=context.rank,
                world_size=context.world_size,
                timeout=timedelta(seconds=self._limit_s),
                device_id=self._device,  # connect now, so that errors are found here
            )
        except RuntimeError as error:
            raise (self.explain(error) or error) from error

    def explain(self, error: Exception) -> PacelineError | None:
        text = str(error).strip() or type(error).__name__
        last = text.splitlines()[-1]  # the reason follows the location and NCCL's error code
        if _SAME_GPU.search(text):
            return EnvironmentLacks(
                f"rank {self._rank}: NCCL needs one GPU per rank, but two ranks have the same; "
                f"use fewer ranks, or transport gloo to share it. NCCL reports: {last}"
            )
        # Checked first, because after a time-out NCCL also reports an aborted communicator.
        timed_out = time_out_of(text, "NCCL", self._rank, self._limit_s, said=last)
        if timed_out is not None:
            return timed_out
        if _PEER_LOST.search(text):
            return PeerLost(
                f"rank {self._rank}: a peer has ended; look at the other ranks' logs. "
                f"NCCL reports: {last}",
                self._rank,
            )
        return None

    def describe(self) -> dict[str, Any]:
        version = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
        return {
            "library": f"nccl {version}",
            "interface": self._interface,
            "device": device_name(self._device),
        }

    def close(self, *, failed: bool) -> None:
        if not dist.is_initialized():
            return
        group = dist.group.WORLD
        if failed and group is not None:
            group.abort()  # wakes operations in the GPU's queue without contacting peers
        dist.destroy_process_group()
