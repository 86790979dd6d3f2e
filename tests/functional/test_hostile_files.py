"""Damaged files of others: each reader takes them or raises one Paceline error.

Formats with a checksum notice every change.
"""

from __future__ import annotations

import io
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
from tests.support.hostile import LONGEST_MESSAGE, damaged
from tests.unit.train.data.conftest import make_dataset

from paceline.analysis.trial.reading import load_run, read_hosts, read_rank_samples
from paceline.base.errors import PacelineError
from paceline.measure.records.documents import CheckpointFolder
from paceline.measure.records.layout import RunFiles
from paceline.measure.records.rows import CommunicationRow, StepRow
from paceline.measure.records.tables import rows
from paceline.measure.telemetry.request import SidecarRequest, read_request
from paceline.plan.spec.loading import load_spec
from paceline.plan.trials.sample_order import SampleOrder
from paceline.runner.job.job import read_trial
from paceline.train.data.batches import FeedOptions, open_feed
from paceline.train.data.dataset import open_dataset
from paceline.train.data.row_groups import ParquetSource
from paceline.train.training.state import Elements, RankState
from paceline.train.training.state_files import Position, StateFiles, write_state

pytestmark = pytest.mark.functional

EXAMPLES = 100


@dataclass(frozen=True)
class Subject:
    """A file, and a call that reads it; exact: any change of the file must be an error."""

    file: Path
    read: Callable[[], object]
    exact: bool = False


def spec(folder: Path) -> Subject:
    source = Path(__file__).parents[2] / "python/src/paceline/plan/experiments/quickstart.toml"
    file = shutil.copy(source, folder / "spec.toml")
    return Subject(Path(file), lambda: load_spec(str(file)))


def planned_trial(folder: Path, run: Path) -> Subject:
    [(_, files)] = RunFiles(run).trials()
    file = Path(shutil.copy(files.trial, folder / "trial.json"))
    return Subject(file, lambda: read_trial(file))


def request(folder: Path) -> Subject:
    asked = SidecarRequest(run="r", trace=folder / "trace.jsonl", pids=(1, 2), facts={})
    file = folder / "request.json"
    file.write_bytes(asked.model_dump_json().encode())
    return Subject(file, lambda: read_request(io.BytesIO(file.read_bytes())))


def dataset_part(folder: Path, name: str) -> Subject:
    made = make_dataset(folder / "set", (3, 3)).path
    order = SampleOrder(row_group_rows=(3, 3), seed=0, global_batch=6, epochs=1)

    def read() -> None:
        source = ParquetSource(open_dataset(made), "image", "label", image_size=16)
        with open_feed(source, order, FeedOptions(0, 1), mode="memory") as feed:
            list(feed)

    return Subject(next(made.glob(name)), read, exact=name.endswith(".parquet"))


def checkpoint(folder: Path) -> Subject:
    """A checkpoint whose checksum is right, because anybody can compute it."""
    root = CheckpointFolder(folder / "checkpoints")
    values = torch.arange(12.0)
    state = RankState(
        tensors=[Elements(name="w", shape=(3, 4), strides=(4, 1), start=0, values=values)],
        values={"schedule": 1},
    )
    position = Position(steps=40, task_sha256="0" * 64, replicas=1)
    root.write(40, 0, 1, lambda file: list(write_state(file, state, position)))
    [found] = root.complete()

    def read() -> None:
        files = StateFiles(found)
        for name in files.names(""):
            files.tensor(name)
            files.value(name)

    return Subject(found.part(0), read)


MAKERS: dict[str, Callable[[Path], Subject]] = {
    "spec": spec,
    "request": request,
    "manifest": partial(dataset_part, name="*.json"),
    "parquet": partial(dataset_part, name="*.parquet"),
    "checkpoint": checkpoint,
}


def check(subject: Subject, examples: range) -> None:
    """Damage the file in many ways; put it back at the end."""
    content = subject.file.read_bytes()
    subject.read()  # the undamaged file is read without an error
    for number in examples:
        changed = damaged(content, random.Random(number))
        subject.file.write_bytes(changed)
        try:
            subject.read()
        except PacelineError as error:
            assert 0 < len(str(error)) < LONGEST_MESSAGE, number  # noqa: PT017
        except Exception as error:
            raise AssertionError(f"example {number} of {subject.file.name}") from error
        else:
            assert changed == content or not subject.exact, f"example {number} is not noticed"
    subject.file.write_bytes(content)


@pytest.mark.parametrize("name", MAKERS)
def test_damaged_file_gives_a_message(name: str, tmp_path: Path) -> None:
    check(MAKERS[name](tmp_path), range(EXAMPLES))


def test_damaged_run_directory_gives_a_message(small_run: Path, tmp_path: Path) -> None:
    copy = RunFiles(Path(shutil.copytree(small_run, tmp_path / "run")))
    [(_, files)] = copy.trials()

    def read() -> None:
        load_run(copy)
        read_hosts(files)
        for _, host in files.hosts():
            read_rank_samples(host)
        for _, rank in files.ranks():
            rows(rank.steps, StepRow)
            rows(rank.communication, CommunicationRow)

    names = ("*.json", "*.jsonl", "*.parquet")
    found = [file for name in names for file in sorted(copy.root.rglob(name))]
    for place, file in enumerate(found):
        check(Subject(file, read), range(place, EXAMPLES, len(found)))


def test_damaged_trial_gives_a_message(small_run: Path, tmp_path: Path) -> None:
    check(planned_trial(tmp_path, small_run), range(EXAMPLES))
