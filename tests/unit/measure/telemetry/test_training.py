"""Training progress from the files of ranks: each row counts once, replaced files start anew."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from tests.support import rows

from paceline.measure.records.files import JsonlWriter
from paceline.measure.records.layout import RankFiles, TrialFiles
from paceline.measure.records.rows import StepRow
from paceline.measure.telemetry.sampler import RankFinder
from paceline.measure.telemetry.training import OperationTotals, TrainingProgress, TrainingTail

HOST = "node-1"
STEP = dataclasses.replace(
    rows.STEP, samples=16, global_samples=32, loss_sum=24.0, data_wait_s=0.25, forward_s=0.5,
    backward_s=1.0, comm_s=0.125, comm_ready_unix_s=1001.75, optimizer_s=0.0625, other_s=0.0625,
    step_s=2.0,
)  # fmt: skip
OPERATION = dataclasses.replace(
    rows.OPERATION, algorithm=None, payload_bytes=100, started_unix_s=None, sent_bytes=150
)


def advance(progress: TrainingProgress, row: StepRow) -> TrainingProgress:
    progress.add_step(dataclasses.asdict(row))
    return progress


class Reader:
    """Reads the progress of the ranks on a host."""

    def __init__(self, trial: TrialFiles, host: str = HOST, replicas: int = 1) -> None:
        self._finder, self._tail = RankFinder(trial.root, host), TrainingTail(trial, replicas)

    def read(self, *, to_the_end: bool = False) -> list[TrainingProgress]:
        return list(self._tail.read(self._finder.statuses(), to_the_end=to_the_end).values())


def test_communication_of_layers_is_communication() -> None:
    row = dataclasses.replace(STEP, backward_s=0.75, pass_comm_s=0.25)
    assert advance(TrainingProgress(), row).phase_s["comm"] == 0.375


def test_step_adds_to_all_sums() -> None:
    first = advance(TrainingProgress(), STEP)
    second = dataclasses.replace(
        STEP, step=1, epoch=1, started_unix_s=1002.0, samples=8, loss_sum=4.0, step_s=0.25
    )
    assert advance(first, second) == TrainingProgress(
        steps=2,
        samples=24,
        epoch=1,
        loss=0.5,
        phase_s={
            "data_wait": 0.5,
            "forward": 1.0,
            "backward": 2.0,
            "bubble": 0.0,
            "comm": 0.25,
            "optimizer": 0.125,
            "other": 0.125,
        },
        step_s_sum=2.25,
        # bounds 0.01 0.025 0.05 0.1 0.25 0.5 1 2.5 ...: a bound belongs to its bucket
        step_counts=[0, 0, 0, 0, 1, 0, 0, 1, 0, 0, 0, 0, 0],
        last_step_ended_unix_s=1002.25,
    )


def test_odd_steps_are_counted_too() -> None:
    row = dataclasses.replace(STEP, step_s=60.5, other_s=-1e-9)  # rounding can make it negative
    progress = advance(TrainingProgress(), row)
    assert progress.step_counts == [0] * 12 + [1]
    assert progress.phase_s["other"] == 0.0


def test_step_without_samples_leaves_the_loss_as_it_was() -> None:
    progress = advance(TrainingProgress(), STEP)
    empty = dataclasses.replace(STEP, step=1, samples=0, loss_sum=0.0)
    assert advance(progress, empty).loss == 1.5


def test_stage_of_a_pipeline_without_the_loss_has_none() -> None:
    first_stage = dataclasses.replace(STEP, loss_sum=0.0, bubble_s=0.5)
    progress = advance(TrainingProgress(), first_stage)
    assert (progress.loss, progress.samples, progress.phase_s["bubble"]) == (None, 16, 0.5)


def test_operations_are_summed_by_kind() -> None:
    progress = TrainingProgress()
    for changes in ({}, {"sequence": 1}, {"operation": "broadcast", "sent_bytes": None}):
        progress.add_operation({**dataclasses.asdict(OPERATION), **changes})
    assert progress.operations == {
        "allreduce": OperationTotals(operations=2, payload_bytes=200, sent_bytes=300, seconds=1.0),
        "broadcast": OperationTotals(operations=1, payload_bytes=100, sent_bytes=None, seconds=0.5),
    }


@pytest.fixture
def trial(tmp_path: Path) -> TrialFiles:
    return TrialFiles(tmp_path / "trial")


@pytest.fixture
def tail(trial: TrialFiles) -> Reader:
    return Reader(trial)


def start(trial: TrialFiles, rank: int, host: str = HOST, **changes: Any) -> RankFiles:
    rows.write_status(trial, rank, host=host, **changes)
    return trial.rank(rank)


def append(path: Path, *rows: object) -> None:
    with JsonlWriter(path) as writer:
        for row in rows:
            writer.write(row)


def test_rank_that_has_not_stepped_is_at_zero(trial: TrialFiles, tail: Reader) -> None:
    assert tail.read() == []
    start(trial, 0)
    assert tail.read() == [TrainingProgress()]


def test_rows_are_counted_once_as_they_come(trial: TrialFiles, tail: Reader) -> None:
    files = start(trial, 0)
    append(files.steps, STEP)
    assert [p.steps for p in tail.read()] == [1]
    assert [p.steps for p in tail.read()] == [1]
    append(files.steps, STEP, STEP)
    append(files.communication, OPERATION)
    (progress,) = tail.read()
    assert (progress.steps, progress.operations["allreduce"].operations) == (3, 1)


def test_ranks_of_other_hosts_are_left_to_them(trial: TrialFiles, tail: Reader) -> None:
    for rank, host in enumerate((HOST, "node-2", HOST)):
        append(start(trial, rank, host).steps, STEP)
    assert [p.steps for p in tail.read()] == [1, 1]


def test_rank_that_moved_to_another_host_is_told_there(trial: TrialFiles, tail: Reader) -> None:
    append(start(trial, 0).steps, STEP)
    there = Reader(trial, "node-2")
    assert (len(tail.read()), len(there.read())) == (1, 0)
    append(start(trial, 0, "node-2").steps, STEP)
    assert tail.read() == []
    assert [p.steps for p in there.read()] == [2]


def test_torn_row_is_counted_when_it_is_whole(trial: TrialFiles, tail: Reader) -> None:
    files = start(trial, 0)
    line = json.dumps(dataclasses.asdict(STEP)).encode() + b"\n"
    files.steps.write_bytes(line + line[:40])
    assert [p.steps for p in tail.read()] == [1]
    with files.steps.open("ab") as file:
        file.write(line[40:])
    assert [p.steps for p in tail.read()] == [2]


def test_file_that_was_replaced_is_read_anew(trial: TrialFiles, tail: Reader) -> None:
    files = start(trial, 0)
    append(files.steps, STEP, STEP)
    append(files.communication, OPERATION)
    tail.read()
    for path in (files.steps, files.communication):
        path.rename(path.with_suffix(".old"))
    append(files.steps, STEP, STEP, STEP)
    (progress,) = tail.read()
    assert (progress.steps, progress.operations) == (3, {})
    files.steps.write_bytes(b"")  # cut off
    append(files.steps, STEP)
    assert [p.steps for p in tail.read()] == [1]


def test_trial_that_is_gone_keeps_what_was_known_of_nobody(trial: TrialFiles, tail: Reader) -> None:
    files = start(trial, 0)
    append(files.steps, STEP)
    tail.read()
    files.status.unlink()
    assert tail.read() == []


def test_damaged_row_is_left_out_and_told_once(trial, tail, caplog) -> None:
    files = start(trial, 0)
    append(files.steps, STEP)
    with files.steps.open("ab") as file:
        file.write(b'{"step": \n[1]\n{"step": 1}\n')
    append(files.steps, {**dataclasses.asdict(STEP), "step_s": "2"}, STEP)
    with caplog.at_level(logging.WARNING, "paceline.sidecar"):
        assert [p.steps for p in tail.read()] == [2]
        tail.read()
    assert len(caplog.records) == 1
    assert str(files.steps) in caplog.text


def test_state_of_a_rank_is_followed(trial: TrialFiles, tail: Reader) -> None:
    start(trial, 0)
    assert [p.failed for p in tail.read()] == [False]
    start(trial, 0, state="failed", error="OSError: disk full")
    assert [p.failed for p in tail.read()] == [True]


def test_much_is_read_in_parts_and_wholly_at_the_end(trial: TrialFiles, tail: Reader) -> None:
    files = start(trial, 0)
    line = json.dumps(dataclasses.asdict(STEP)).encode() + b"\n"
    rows = (1 << 20) // len(line) + 100
    files.steps.write_bytes(line * rows)
    (part,) = tail.read()
    assert part.steps == (1 << 20) // len(line)
    (whole,) = tail.read(to_the_end=True)
    assert whole.steps == rows


def test_line_without_an_end_does_not_keep_it_from_reading_on(trial, tail) -> None:
    files = start(trial, 0)
    files.steps.write_bytes(b"x" * (1 << 20) + b"xx\n")
    append(files.steps, STEP)
    (progress,) = tail.read(to_the_end=True)
    assert progress.steps == 1


def test_loss_of_a_pipelines_last_stage_uses_the_number_of_replicas(trial: TrialFiles) -> None:
    tail = Reader(trial, replicas=2)
    row = dataclasses.replace(STEP, samples=0, global_samples=32, loss_sum=24.0, bubble_s=0.1)
    append(start(trial, 3).steps, row)
    assert [(p.loss, p.samples) for p in tail.read()] == [(1.5, 0)]
