"""Gloo, torch's own TCP library, bound to the requested network interface."""

from __future__ import annotations

import os
import re
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from paceline.transports.base import PeerLost
from paceline.transports.gloo.process_group import BACKEND
from paceline.transports.interfaces import check_interface, time_out_of

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from paceline.errors import PacelineError
    from paceline.plan.trial import Trial
    from paceline.training.context import RankContext

# Texts with which Gloo and c10d report a peer that closed its socket.
_PEER_LOST = re.compile(
    r"connection (closed|reset|refused)|broken pipe|socket (closed|error)", re.IGNORECASE
)


class GlooTransport:
    """One connection to each peer over `trial.interface`."""

    name = "gloo"

    def __init__(self) -> None:
        self._rank = 0
        self._limit_s = 0.0
        self._interface = ""

    def open(self, context: RankContext, trial: Trial, store: Store) -> None:
        self._rank, self._limit_s = context.rank, trial.limits.collective_s
        self._interface = trial.interface
        check_interface(trial.interface, context.host, "Gloo")
        # With init_process_group this variable is the only way to choose Gloo's interface.
        os.environ["GLOO_SOCKET_IFNAME"] = trial.interface
        try:
            dist.init_process_group(
                BACKEND,
                store=PrefixStore("gloo", store),
                rank=context.rank,
                world_size=context.world_size,
                timeout=timedelta(seconds=self._limit_s),
            )
        except RuntimeError as error:
            raise (self.explain(error) or error) from error

    def explain(self, error: Exception) -> PacelineError | None:
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        timed_out = time_out_of(text, "Gloo", self._rank, self._limit_s)
        if timed_out is not None:
            return timed_out
        if _PEER_LOST.search(text):
            return PeerLost(
                f"rank {self._rank}: a peer closed its connection; look at the other ranks' logs. "
                f"Gloo reports: {text}",
                self._rank,
            )
        return None

    def describe(self) -> dict[str, Any]:
        return {"library": "gloo", "interface": self._interface}

    def close(self, *, failed: bool) -> None:  # noqa: ARG002  (local either way)
        if dist.is_initialized():
            dist.destroy_process_group()
