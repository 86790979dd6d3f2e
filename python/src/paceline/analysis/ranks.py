"""Position of a rank on its node: the stage of the model that it holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.analysis.reading import RankRecord
    from paceline.plan.trial import Trial


def stage_of(trial: Trial, rank: RankRecord) -> int:
    """The stage of the model that a rank holds; 0 without a pipeline.

    The ranks of a node are dealt out replica by replica: of s stages, local rank L holds stage
    L mod s of replica L div s.
    """
    if rank.environment is not None:
        local_rank = rank.environment.local_rank
    else:
        local_rank = rank.rank % trial.placement.ranks_per_node
    return local_rank % trial.placement.stages
