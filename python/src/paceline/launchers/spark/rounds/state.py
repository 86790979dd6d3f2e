"""A replica's weights and momentum as one array, for averaging."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.launchers.spark.rounds.exchange import State
    from paceline.strategies.local_sgd.steps import LocalReplica


def scaled_state(replica: LocalReplica, share: float) -> State:
    """Return the replica's state times `share`, as a new array."""
    parts = _parts(replica)
    scaled = np.empty(sum(p.numel() for p in parts), dtype=np.float32)
    start = 0
    for part in parts:
        end = start + part.numel()
        np.multiply(part.numpy(), np.float32(share), out=scaled[start:end])
        start = end
    return scaled


def load_state(replica: LocalReplica, state: State) -> None:
    """Load an averaged state, in the layout of `scaled_state`, into the replica."""
    start = 0
    for part in _parts(replica):
        end = start + part.numel()
        part.copy_(torch.from_numpy(state[start:end]))
        start = end


def state_bytes(replica: LocalReplica) -> int:
    """Return the bytes that a task sends in a round, and receives."""
    return sum(part.numel() * part.element_size() for part in _parts(replica))


def _parts(replica: LocalReplica) -> list[Tensor]:
    return [replica.weights, *([] if replica.momentum is None else [replica.momentum])]
