"""Which samples every global step saw: the proof that trials trained on the same batches."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from paceline.errors import DataError
from paceline.records.files import read_jsonl

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from paceline.plan.schedule import Schedule
    from paceline.records.layout import TrialFiles

# epoch and sorted sample ids of a global step, repetitions kept
StepSamples = tuple[int, "NDArray[np.int64]"]


def read_sample_log(files: TrialFiles) -> dict[int, StepSamples]:
    """The union of all ranks' sample logs by global step; empty if no rank wrote one.

    Raises DataError if a row is damaged.
    """
    ids: dict[int, list[int]] = {}
    epochs: dict[int, int] = {}
    for rank, rank_files in files.ranks():
        if not rank_files.sample_log.exists():
            continue
        for row in read_jsonl(rank_files.sample_log):
            try:
                step, epoch, samples = int(row["step"]), int(row["epoch"]), row["sample_ids"]
            except (KeyError, TypeError, ValueError) as error:
                raise DataError(f"{rank_files.sample_log}: not a sample log row: {row}") from error
            if epochs.setdefault(step, epoch) != epoch:
                raise DataError(
                    f"{rank_files.sample_log}: rank {rank} has step {step} in epoch {epoch}, "
                    f"another rank in epoch {epochs[step]}"
                )
            ids.setdefault(step, []).extend(samples)
    return {
        step: (epochs[step], np.sort(np.array(ids[step], dtype=np.int64))) for step in sorted(ids)
    }


def own_faults(sample_log: Mapping[int, StepSamples]) -> list[str]:
    """What is wrong with a sample log by itself: gaps, samples seen twice, epochs that differ."""
    steps = list(sample_log)
    faults = []
    if steps != list(range(len(steps))):
        missing = sorted(set(range(max(steps) + 1)) - set(steps))
        faults.append(f"steps {_some(missing)} are missing")
    by_epoch: dict[int, list[NDArray[np.int64]]] = {}
    for epoch, ids in sample_log.values():
        by_epoch.setdefault(epoch, []).append(ids)
    epochs = {epoch: np.sort(np.concatenate(parts)) for epoch, parts in by_epoch.items()}
    for epoch, ids in epochs.items():
        twice = np.unique(ids[1:][ids[1:] == ids[:-1]])
        if len(twice):
            faults.append(f"epoch {epoch} saw samples {_some(twice.tolist())} more than once")
    # every epoch but the last ran to its end, so all of those saw the same samples
    whole = [epochs[e] for e in sorted(epochs)[:-1]]
    for epoch, ids in zip(sorted(epochs)[1:], whole[1:], strict=False):
        if not np.array_equal(ids, whole[0]):
            faults.append(f"epoch {epoch} did not see the samples of epoch 0")
    if whole and not np.isin(epochs[max(epochs)], whole[0]).all():
        faults.append(f"epoch {max(epochs)} saw samples that epoch 0 did not")
    return faults


def differences(
    sample_log: Mapping[int, StepSamples], other: Mapping[int, StepSamples], name: str
) -> list[str]:
    """Where a sample log differs from `other`, which is called `name` in the sentences."""
    faults = []
    if len(sample_log) != len(other):
        faults.append(f"{len(sample_log)} steps, {name} has {len(other)}")
    wrong = [
        step
        for step in sorted(set(sample_log) & set(other))
        if not np.array_equal(sample_log[step][1], other[step][1])
    ]
    if wrong:
        faults.append(f"steps {_some(wrong)} saw other samples than {name}")
    return faults


def scheduled(schedule: Schedule) -> dict[int, StepSamples]:
    """The sample log that a schedule promises."""
    planned = (schedule.step(step) for step in range(schedule.steps))
    return {p.step: (p.epoch, np.sort(p.sample_ids)) for p in planned}


def _some(numbers: list[int]) -> str:
    shown = ", ".join(str(n) for n in numbers[:5])
    return shown if len(numbers) <= 5 else f"{shown}, ... ({len(numbers)} in all)"
