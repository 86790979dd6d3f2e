"""A replica's weights and momentum as one array, for averaging."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.launchers.spark.rounds.exchange import State
    from paceline.strategies.local_sgd.steps import LocalReplica


def scaled_state(replica: LocalReplica, share: float) -> State:
    """Return the replica's state times `share`, as a new array."""
    return torch.cat(_parts(replica)).mul_(share).numpy()


def load_state(replica: LocalReplica, state: State) -> None:
    """Load an averaged state, in the layout of `scaled_state`, into the replica."""
    parts = _parts(replica)
    averaged = torch.split(torch.from_numpy(state), [part.numel() for part in parts])
    for part, values in zip(parts, averaged, strict=True):
        part.copy_(values)


def state_bytes(replica: LocalReplica) -> int:
    """Return the bytes that a task sends in a round, and receives."""
    return sum(part.nbytes for part in _parts(replica))


def _parts(replica: LocalReplica) -> list[Tensor]:
    return [replica.weights, *([] if replica.momentum is None else [replica.momentum])]
