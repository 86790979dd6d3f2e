"""torch's default process group, and its transports over a network: Gloo (torch's own) and NCCL.

With NCCL, NVIDIA's library for communication between GPUs, each rank has one GPU. NCCL works
asynchronously. A thread of torch (the watchdog) notices a collective that fails or exceeds its
limit. Unless the program is inside a call at that moment, the watchdog ends the process with the
reason on stderr. This is intended: nothing else can wake what waits in a GPU's queue.
"""

from __future__ import annotations

import os
import re
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from paceline.base.errors import EnvironmentLacks, PacelineError, PeerLost, TimedOut
from paceline.base.torch_internals import abort_process_groups
from paceline.collectives import register
from paceline.collectives.errors import TIMED_OUT
from paceline.collectives.gloo_group import BACKEND
from paceline.collectives.host import interface_address
from paceline.collectives.nccl_records import record_nccl
from paceline.collectives.torch_internals import PrefixStore, Store
from paceline.measure.records.communication import TransportResult
from paceline.plan.trials.trial import RankContext, Trial
from paceline.train.training.devices import device_name, device_of, use_device


class DefaultGroupTransport:
    """A transport that opens torch's default process group with one backend."""

    backend: ClassVar[str]
    _group: Any = None  # a dist.ProcessGroup

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


class NetworkTransport(DefaultGroupTransport):
    """A transport of a library that uses one network interface and reports errors as text."""

    library: ClassVar[str]  # name in messages
    peer_lost: ClassVar[re.Pattern[str]]  # texts that report a peer that has ended
    _rank, _limit_s, _interface = 0, 0.0, ""  # before it is opened

    def open_group(self, context: RankContext, trial: Trial, store: Store, **options: Any) -> None:
        """Open the default process group; translate the errors of the library."""
        self._rank, self._limit_s = context.rank, trial.limits.collective_s
        self._interface = trial.interface
        interface_address(trial.interface)  # raises EnvironmentLacks without that interface
        try:
            super().open_group(context, trial, store, **options)
        except RuntimeError as error:
            meaning = self.explain(error)
            if meaning is None:  # an error must not become its own cause
                raise
            raise meaning from error

    def explain(self, error: Exception) -> PacelineError | None:
        """Return TimedOut or PeerLost if the text of the error reports it, else None."""
        text = self.text_of(error)
        reports = f"{self.library} reports: {text.splitlines()[-1]}"
        # Checked first: after a time-out, a library may also report closed connections.
        if TIMED_OUT.search(text):
            return TimedOut(
                f"rank {self._rank}: a collective of {self.library} did not end within "
                f"{self._limit_s:g} s (limits.collective_s): a peer is blocked or gone. {reports}"
            )
        if self.peer_lost.search(text):
            return PeerLost(
                f"rank {self._rank}: a peer has ended or closed its connection; look at the other "
                f"ranks' logs. {reports}",
                self._rank,
            )
        return None

    def text_of(self, error: Exception) -> str:
        """Return the text that tells the reason, in its last line."""
        return str(error).strip() or type(error).__name__


class GlooTransport(NetworkTransport):
    """One connection to each peer over `trial.interface`."""

    backend = BACKEND
    library = "Gloo"
    # Texts with which Gloo and c10d report a peer that closed its socket.
    peer_lost = re.compile(
        r"connection (closed|reset|refused)|broken pipe|socket (closed|error)", re.IGNORECASE
    )

    def open(self, context: RankContext, trial: Trial, store: Store) -> None:
        # With init_process_group this variable is the only way to choose Gloo's interface.
        os.environ["GLOO_SOCKET_IFNAME"] = trial.interface
        self.open_group(context, trial, store)

    def describe(self) -> TransportResult:
        return {"library": "gloo", "interface": self._interface}

    def text_of(self, error: Exception) -> str:
        return super().text_of(error).splitlines()[0]  # a stack trace may follow

    def close(self, *, failed: bool) -> None:  # noqa: ARG002  (no operation waits for peers here)
        super().close(failed=False)


class SharedMemoryTransport(GlooTransport):
    """Back end `paceline`: shared memory within a host, Gloo over `trial.interface` between
    hosts."""

    backend = "paceline"

    def open(self, context: RankContext, trial: Trial, store: Store) -> None:
        register()
        super().open(context, trial, store)

    def explain(self, error: Exception) -> PacelineError | None:
        failure: PacelineError | None = getattr(self._group, "failure", None)
        return failure or super().explain(error)

    def describe(self) -> TransportResult:
        how = self._group.describe() if hasattr(self._group, "describe") else {}
        return {**super().describe(), "library": "paceline", **how}


_SAME_GPU = re.compile(r"duplicate gpu", re.IGNORECASE)
# Both are torch's defaults. With other values from the user's environment nothing would end a wait
# in a GPU's queue (ProcessGroupNCCL.hpp).
_END_PROCESS = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3", "TORCH_NCCL_BLOCKING_WAIT": "0"}


class NcclTransport(NetworkTransport):
    """All-reduce among GPUs: within a node over NVLink or PCIe, between nodes over the network."""

    backend = "nccl"
    library = "NCCL"
    # Texts of torch and NCCL (ProcessGroupNCCL.cpp, NCCLUtils.cpp; ncclResult_t in NCCL's manual)
    peer_lost = re.compile(
        r"ncclRemoteError|remote process exit|communicator was aborted|connection (closed|reset)",
        re.IGNORECASE,
    )
    _device = torch.device("cpu")

    def open(self, context: RankContext, trial: Trial, store: Store) -> None:
        if not dist.is_nccl_available():
            raise EnvironmentLacks(
                f"host {context.host}: transport nccl needs a torch with NCCL, torch "
                f"{torch.__version__} is built without; install the same version's CUDA build "
                "(pytorch.org, Get Started), or use transport gloo"
            )
        self._device = device_of(trial, context)
        use_device(self._device, trial.training)
        # "=" selects exactly this interface instead of a prefix (NCCL's manual)
        os.environ.update(_END_PROCESS, NCCL_SOCKET_IFNAME=f"={trial.interface}")
        # With its device given, NCCL connects now, so that errors are found here.
        self.open_group(context, trial, store, device_id=self._device)
        record_nccl(self._group)

    def explain(self, error: Exception) -> PacelineError | None:
        text = self.text_of(error)
        if _SAME_GPU.search(text):
            return EnvironmentLacks(
                f"rank {self._rank}: NCCL needs one GPU per rank, but two ranks have the same; "
                "use fewer ranks, or transport gloo to share it. NCCL reports: "
                f"{text.splitlines()[-1]}"  # after the location and NCCL's error code
            )
        return super().explain(error)

    def describe(self) -> TransportResult:
        version = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
        return {
            "library": f"nccl {version}",
            "interface": self._interface,
            "device": device_name(self._device),
        }
