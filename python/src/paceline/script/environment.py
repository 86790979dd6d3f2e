"""The environment variables that torchrun sets, for a script that any launcher started."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.plan.rank_context import RankContext
    from paceline.plan.trial import Trial


def torchrun_variables(trial: Trial, context: RankContext) -> dict[str, str]:
    """Return what torchrun would set for this rank (torch/distributed/run.py, "Environment
    Variables").

    A store that the script opens with MASTER_ADDR and MASTER_PORT connects to Paceline's. A single
    rank has none, and port 0 lets it open one of its own.
    """
    address = context.store
    variables = {
        "RANK": context.rank,
        "WORLD_SIZE": context.world_size,
        "LOCAL_RANK": context.local_rank,
        "LOCAL_WORLD_SIZE": context.ranks_on_node,
        "GROUP_RANK": context.node_index,
        "GROUP_WORLD_SIZE": trial.placement.nodes,
        "ROLE_NAME": "default",
        "ROLE_RANK": context.rank,
        "ROLE_WORLD_SIZE": context.world_size,
        "MASTER_ADDR": "127.0.0.1" if address is None else address.host,
        "MASTER_PORT": 0 if address is None else address.port,
        "TORCHELASTIC_RUN_ID": trial.id,
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_MAX_RESTARTS": 0,
        "TORCHELASTIC_USE_AGENT_STORE": address is not None,  # a store listens already
    }
    return {name: str(value) for name, value in variables.items()}
