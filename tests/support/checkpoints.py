"""Write and read checkpoints in tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.measure.records.documents import CheckpointFolder
from paceline.train.training.state import RankState
from paceline.train.training.state_files import Position, StateFiles, write_state


def save_part(
    folder: Path, state: RankState, rank: int = 0, ranks: int = 1, **position: Any
) -> None:
    """Write a rank's part of a checkpoint; position: fields with other values."""
    place = Position(**{"steps": 3, "task_sha256": "a", "replicas": 1, **position})
    CheckpointFolder(folder).write(
        place.steps, rank, ranks, lambda file: list(write_state(file, state, place))
    )


def read_checkpoint(folder: Path) -> StateFiles:
    """Return the newest checkpoint as a strategy reads it."""
    return StateFiles(CheckpointFolder(folder).complete()[0])
