"""Export to TensorBoard: a folder with event files for each trial."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.export.run_data import require
from paceline.export.tracking import run_tags, tracked_trials

if TYPE_CHECKING:
    from pathlib import Path

    from paceline.export.run_data import RunData
    from paceline.export.tracking import TrackedTrial


def write_tensorboard(run: RunData, out: Path, trial: str | None) -> list[Path]:
    """Write curves, parameters with results (tab HPARAMS), and texts; replace earlier files.

    Raises EnvironmentLacks without the library.
    """
    require("tensorboard", "tensorboard")
    tags = run_tags(run)
    written = []
    for tracked in tracked_trials(run, trial):
        folder = out / tracked.id
        for old in folder.glob("events.out.tfevents.*"):
            old.unlink()
        _write(tracked, folder, tags)
        written.append(folder)
    return written


def _write(tracked: TrackedTrial, folder: Path, tags: dict[str, str]) -> None:
    from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415  (imports the extra)

    values = {
        name: value if isinstance(value, bool | int | float | str) else str(value)
        for name, value in tracked.parameters.items()
    }
    with SummaryWriter(str(folder)) as writer:
        for point in tracked.points:
            writer.add_scalar(point.name, point.value, point.step, point.unix_s)
        writer.add_hparams(values, tracked.metrics, run_name=".")
        writer.add_text("run", "\n".join(f"- {name}: {text}" for name, text in tags.items()))
        writer.add_text("command", f"    {(tracked.record.command or '').strip()}")
