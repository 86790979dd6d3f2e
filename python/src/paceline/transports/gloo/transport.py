"""Gloo, torch's own TCP library, bound to the requested network interface."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any

from paceline.transports.gloo.process_group import BACKEND
from paceline.transports.interfaces import NetworkTransport

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from paceline.plan.rank_context import RankContext
    from paceline.plan.trial import Trial


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

    def describe(self) -> dict[str, Any]:
        return {"library": "gloo", "interface": self._interface}

    def text_of(self, error: Exception) -> str:
        return super().text_of(error).splitlines()[0]  # a stack trace may follow

    def close(self, *, failed: bool) -> None:  # noqa: ARG002  (no operation waits for peers here)
        super().close(failed=False)
