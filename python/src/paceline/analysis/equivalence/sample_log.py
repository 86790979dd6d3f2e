"""Sample log: which samples every global step saw, the proof that trials used the same batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

import numpy as np
import polars as pl
from numpy.typing import NDArray

from paceline.base.errors import DataError
from paceline.measure.records.layout import TrialFiles
from paceline.measure.records.rows import SampleLogRow
from paceline.measure.records.tables import read_table
from paceline.plan.trials.sample_order import SampleOrder

# epoch and sorted sample ids of a global step, repetitions kept
StepSamples = tuple[int, "NDArray[np.int64]"]


def read_sample_log(files: TrialFiles) -> dict[int, StepSamples]:
    """Join all ranks' sample logs by global step; empty if no rank wrote one.

    Raises DataError if a row is damaged, or if ranks disagree on the epoch of a step.
    """
    parts = [read_table(rank_files.sample_log, SampleLogRow) for _, rank_files in files.ranks()]
    if not any(len(part) for part in parts):
        return {}
    steps = (
        pl.concat(parts)
        .group_by("step")
        .agg(
            pl.col("epoch").min(),
            pl.col("epoch").max().alias("last_epoch"),
            pl.col("sample_ids").explode().drop_nulls().sort(),
        )
        .sort("step")
    )
    unequal = steps.filter(pl.col("epoch") != pl.col("last_epoch"))
    if not unequal.is_empty():
        step, first, last = unequal.select("step", "epoch", "last_epoch").row(0)
        raise DataError(
            f"{files.root}: sample logs of its ranks put step {step} in epoch {first} and in "
            f"epoch {last}; expected one epoch"
        )
    return {
        step: (epoch, ids.to_numpy())
        for step, epoch, ids in zip(
            steps["step"].to_list(), steps["epoch"].to_list(), steps["sample_ids"], strict=True
        )
    }


def own_faults(sample_log: Mapping[int, StepSamples]) -> list[str]:
    """List the faults of one sample log: missing steps, repeated samples, unequal epochs."""
    steps = list(sample_log)
    faults: list[str] = []
    if steps != list(range(len(steps))):
        faults += _missing(set(steps))
    by_epoch: dict[int, list[NDArray[np.int64]]] = {}
    for epoch, ids in sample_log.values():
        by_epoch.setdefault(epoch, []).append(ids)
    epochs = {epoch: np.sort(np.concatenate(parts)) for epoch, parts in by_epoch.items()}
    for epoch, ids in epochs.items():
        twice = np.unique(ids[1:][ids[1:] == ids[:-1]])
        if len(twice):
            faults.append(f"epoch {epoch} saw samples {some(twice.tolist())} more than once")
    # every epoch but the last is complete, so all of these saw the same samples
    whole = [epochs[e] for e in sorted(epochs)[:-1]]
    for epoch, ids in zip(sorted(epochs)[1:], whole[1:], strict=False):
        if not np.array_equal(ids, whole[0]):
            faults.append(f"epoch {epoch} did not see the samples of epoch 0")
    if whole and not np.isin(epochs[max(epochs)], whole[0]).all():
        faults.append(f"epoch {max(epochs)} saw samples that epoch 0 did not")
    return faults


def _missing(steps: set[int]) -> Iterator[str]:
    """Say which steps before the last one are missing, of a log that may name any number."""
    count = max(steps) + 1 - sum(step >= 0 for step in steps)
    first = list(islice((step for step in range(max(steps)) if step not in steps), _NAMED + 1))
    if count:
        yield f"steps {some(first, count)} are missing"
    if min(steps) < 0:
        yield f"step {min(steps)} is before the first one"


def differences(
    sample_log: Mapping[int, StepSamples], other: Mapping[int, StepSamples], name: str
) -> list[str]:
    """List the differences from `other`, which is called `name` in the sentences."""
    faults = []
    if len(sample_log) != len(other):
        faults.append(f"{len(sample_log)} steps, {name} has {len(other)}")
    wrong = [
        step
        for step in sorted(set(sample_log) & set(other))
        if not np.array_equal(sample_log[step][1], other[step][1])
    ]
    if wrong:
        faults.append(f"steps {some(wrong)} saw other samples than {name}")
    return faults


def planned_log(order: SampleOrder) -> dict[int, StepSamples]:
    """Return the sample log that follows from the planned order of samples."""
    planned = (order.step(step) for step in range(order.steps))
    return {p.step: (p.epoch, np.sort(p.sample_ids)) for p in planned}


_NAMED = 5  # numbers in a message


def some(numbers: Sequence[object], count: int | None = None) -> str:
    """Return the first ones in words, and how many there are. count: if these are not all."""
    shown = ", ".join(str(n) for n in numbers[:_NAMED])
    in_all = len(numbers) if count is None else count
    return shown if in_all <= _NAMED else f"{shown}, ... ({in_all} in all)"
