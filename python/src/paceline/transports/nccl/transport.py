"""NCCL, NVIDIA's library for communication between GPUs; each rank has one GPU.

NCCL works asynchronously. A thread of torch (the watchdog) notices a collective that fails or
exceeds its limit. Unless the program is inside a call at that moment, the watchdog ends the process
with the reason on stderr. This is intended: nothing else can wake what waits in a GPU's queue.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from paceline.errors import EnvironmentLacks, PacelineError
from paceline.training.devices import device_name, device_of, use_device
from paceline.transports.interfaces import NetworkTransport

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from paceline.plan.rank_context import RankContext
    from paceline.plan.trial import Trial

# Texts of torch and NCCL (ProcessGroupNCCL.cpp, NCCLUtils.cpp; ncclResult_t in NCCL's manual)
_PEER_LOST = re.compile(
    r"ncclRemoteError|remote process exit|communicator was aborted|connection (closed|reset)",
    re.IGNORECASE,
)
_SAME_GPU = re.compile(r"duplicate gpu", re.IGNORECASE)
# Both are torch's defaults. With other values from the user's environment nothing would end a wait
# in a GPU's queue (ProcessGroupNCCL.hpp).
_END_PROCESS = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3", "TORCH_NCCL_BLOCKING_WAIT": "0"}


class NcclTransport(NetworkTransport):
    """All-reduce among GPUs: within a node over NVLink or PCIe, between nodes over the network."""

    backend = "nccl"
    library = "NCCL"
    peer_lost = _PEER_LOST

    def __init__(self) -> None:
        super().__init__()
        self._device = torch.device("cpu")

    def open(self, context: RankContext, trial: Trial, store: Store) -> None:
        if not dist.is_nccl_available():
            raise EnvironmentLacks(
                f"host {context.host}: transport nccl needs a torch with NCCL, torch "
                f"{torch.__version__} is built without; install the same version's CUDA build "
                "(pytorch.org, Get Started), or use transport gloo"
            )
        self._device = device_of(trial, context)
        use_device(self._device)
        # "=" selects exactly this interface instead of a prefix (NCCL's manual)
        os.environ.update(_END_PROCESS, NCCL_SOCKET_IFNAME=f"={trial.interface}")
        # With its device given, NCCL connects now, so that errors are found here.
        self.open_group(context, trial, store, device_id=self._device)

    def explain(self, error: Exception) -> PacelineError | None:
        text = self.text_of(error)
        if _SAME_GPU.search(text):
            return EnvironmentLacks(
                f"rank {self._rank}: NCCL needs one GPU per rank, but two ranks have the same; "
                "use fewer ranks, or transport gloo to share it. NCCL reports: "
                f"{text.splitlines()[-1]}"  # after the location and NCCL's error code
            )
        return super().explain(error)

    def describe(self) -> dict[str, Any]:
        version = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
        return {
            "library": f"nccl {version}",
            "interface": self._interface,
            "device": device_name(self._device),
        }
