"""The samples of a user's task: fields of a data set by name, or a data set of the task."""

from __future__ import annotations

import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.support.thread_ranks import ThreadNode

from paceline.base.errors import DataError, EnvironmentLacks, UsageError
from paceline.collectives.node.memory import SoloNode
from paceline.plan.trials.trial import Evaluation
from paceline.train.data import dataset as dataset_module
from paceline.train.data.dataset import order_of
from paceline.train.data.register import register
from paceline.train.rank.samples import open_samples

TASKS = """
import numpy as np
import paceline
from torch import nn

class Own(paceline.Task):
    input_field, target_field = "x", "y"

    def model(self):
        return nn.Linear(3, max(1, self.settings.classes))

class Lacking(Own):
    target_field = "z"

class Flipped(Own):
    def augment(self, sample, random):
        return -sample if random.coin else sample

class Moved(Own):
    def augment(self, sample, random):
        return sample + random.numpy().integers(1, 9)

    def augment_target(self, target, random):
        return target + random.numpy().integers(1, 9)

class Items(Own):
    def dataset(self):
        return [(np.full(5, i, np.float32), i) for i in range(9)]

class ItemsOfBoth(Items):
    def held_out_dataset(self, place):
        return [(np.full(5, -i, np.float32), i) for i in range(int(place))]
"""
ROWS = 10


@pytest.fixture
def training_of(tmp_path, make_trial):
    """Makes a training of a task in TASKS, on a Parquet file with fields x and y."""
    (tmp_path / "tasks.py").write_text(TASKS)
    (tmp_path / "set").mkdir()
    lists = pa.array(np.ones((ROWS, 3)).tolist(), pa.list_(pa.float64()))
    labels = pa.array([i % 2 for i in range(ROWS)])
    pq.write_table(pa.table({"x": lists, "y": labels}), tmp_path / "set" / "a.parquet")
    register(tmp_path / "set")

    def make(task, **changes):
        values = {"dataset": str(tmp_path / "set"), "global_batch": 4, **changes}
        return make_trial(task=f"{tmp_path}/tasks.py:{task}", **values)

    return make


def batches_of(trial, samples):
    with samples.feed(trial, rank=0, world_size=1) as feed:
        return list(feed)


def test_a_task_names_the_fields_of_its_samples(training_of, tmp_path):
    trial = training_of("Own")
    with open_samples(trial.training, tmp_path, SoloNode()) as samples:
        settings = samples.task.settings
        assert (settings.classes, settings.input_shape, settings.steps) == (2, (3,), 3)
        assert samples.task.example_input().shape == (1, 3)
        batches = batches_of(trial, samples)
    assert samples.order == order_of(trial.training)
    ids = np.concatenate([batch.sample_ids for batch in batches])
    assert sorted(ids.tolist()) == list(range(ROWS))
    targets = np.concatenate([batch.targets for batch in batches])
    assert np.array_equal(targets, ids % 2)
    assert samples.task.to_input(batches[0].inputs).dtype.is_floating_point


def test_a_missing_field_is_reported_with_those_that_exist(training_of, tmp_path):
    trial = training_of("Lacking")
    message = r'expected a field "z", found x \(float64, 3\), y \(int64\); set input_field'
    with (
        pytest.raises(UsageError, match=message),
        open_samples(trial.training, tmp_path, SoloNode()),
    ):
        pass


def test_samples_that_are_no_images_are_changed_only_by_the_tasks_own_transform(
    training_of, tmp_path
):
    for name, expected in (("Own", {1.0}), ("Flipped", {1.0, -1.0})):
        trial = training_of(name)
        with open_samples(trial.training, tmp_path, SoloNode()) as samples:
            values = np.concatenate([batch.inputs for batch in batches_of(trial, samples)])
        assert set(np.unique(values).tolist()) == expected


@pytest.mark.parametrize("reading", ["memory", "stream"])
def test_a_task_may_have_samples_of_its_own(training_of, tmp_path, reading):
    trial = training_of("Items", dataset="", items=9, reading=reading)
    with open_samples(trial.training, tmp_path, SoloNode()) as samples:
        assert samples.task.settings.input_shape == (5,)
        batches = batches_of(trial, samples)
    assert samples.order == order_of(trial.training)
    for batch in batches:
        assert np.array_equal(batch.inputs[:, 4], batch.sample_ids)
        assert np.array_equal(batch.targets, batch.sample_ids)


def test_a_task_without_samples_is_refused(training_of, tmp_path):
    trial = training_of("Own", dataset="", items=9)
    with (
        pytest.raises(UsageError, match=r"Own\.dataset\(\): expected a data set, got None"),
        open_samples(trial.training, tmp_path, SoloNode()),
    ):
        pass


def test_first_rank_of_a_node_drops_the_files_before_any_rank_reads(
    training_of, tmp_path, monkeypatch
):
    dropped, read = [], []

    def drop(file):
        dropped.append(file)
        return 0

    monkeypatch.setattr(dataset_module, "drop_cached_pages", drop)
    trial = training_of("Own", reading="cold")
    node = ThreadNode(2)

    def read_as(rank):
        with open_samples(trial.training, tmp_path, node.of(rank)) as samples:
            read.append(len(dropped))
            with samples.feed(trial, rank=rank, world_size=2) as feed:
                return np.concatenate([batch.sample_ids for batch in feed])

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(read_as, range(2)))
    assert dropped == [tmp_path / "set" / "a.parquet"]
    assert read == [1, 1]
    assert sorted(np.concatenate(found).tolist()) == list(range(ROWS))


def test_files_that_are_in_memory_only_cannot_be_read_cold(training_of, tmp_path):
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        place = write_set(Path(folder, "set"), 500)
        trial = training_of("Own", reading="cold", dataset=str(place))
        with (
            pytest.raises(EnvironmentLacks, match=r"bytes stay; move the data set to a disk"),
            open_samples(trial.training, tmp_path, SoloNode()),
        ):
            pass


@pytest.mark.parametrize("reading", ["memory", "stream"])
def test_target_is_transformed_by_the_random_numbers_of_its_input(training_of, tmp_path, reading):
    trial = training_of("Moved", reading=reading, epochs=2)
    with open_samples(trial.training, tmp_path, SoloNode()) as samples:
        batches = batches_of(trial, samples)
        with samples.feed(trial, rank=0, world_size=1, with_inputs=False) as feed:
            without_inputs = list(feed)
    shifts = []
    for batch, other in zip(batches, without_inputs, strict=True):
        shift = batch.inputs[:, 0] - 1  # all stored inputs are 1
        np.testing.assert_array_equal(batch.targets - shift, batch.sample_ids % 2)
        np.testing.assert_array_equal(other.targets, batch.targets)
        assert other.inputs is None
        shifts.append(shift)
    assert len(np.unique(np.concatenate(shifts))) > 3


def evaluation_on(place):
    return Evaluation(
        held_out_samples=0, held_out_data=str(place), split_seed=1, every_steps=1, every_epochs=None
    )


def write_set(folder, rows, width=3, label=1):
    folder.mkdir()
    lists = pa.array(np.full((rows, width), 7.0).tolist(), pa.list_(pa.float64()))
    pq.write_table(pa.table({"x": lists, "y": pa.array([label] * rows)}), folder / "a.parquet")
    register(folder)
    return folder


@pytest.mark.parametrize("reading", ["memory", "stream"])
def test_data_to_evaluate_on_may_be_another_data_set(training_of, tmp_path, reading):
    other = write_set(tmp_path / "other", 5)
    trial = training_of("Flipped", reading=reading, evaluation=evaluation_on(other))
    with open_samples(trial.training, tmp_path, SoloNode()) as samples:
        trained = batches_of(trial, samples)
        found = []
        for rank in (0, 1):
            with samples.held_out_feed(trial, rank, 2) as feed:
                found += [(batch.sample_ids, batch.inputs) for batch in feed]
    # all samples of both, those to evaluate on not transformed
    assert sorted(np.concatenate([batch.sample_ids for batch in trained])) == list(range(ROWS))
    assert sorted(np.concatenate([ids for ids, _ in found]).tolist()) == list(range(5))
    assert {float(v) for _, inputs in found for v in inputs.ravel()} == {7.0}


def test_task_with_samples_of_its_own_has_others_to_evaluate_on(training_of, tmp_path):
    own = {"dataset": "", "items": 9}
    trial = training_of("ItemsOfBoth", **own, evaluation=evaluation_on(3))
    with (
        open_samples(trial.training, tmp_path, SoloNode()) as samples,
        samples.held_out_feed(trial, 0, 1) as feed,
    ):
        [batch] = feed
    assert batch.inputs is not None
    np.testing.assert_array_equal(batch.inputs[:, 0], [0, -1, -2])
    trial = training_of("Items", **own, evaluation=evaluation_on(3))
    with (
        pytest.raises(UsageError, match=r"Items: expected held_out_dataset\(place\) for held"),
        open_samples(trial.training, tmp_path, SoloNode()),
    ):
        pass


def test_data_of_another_shape_to_evaluate_on_are_refused(training_of, tmp_path):
    other = write_set(tmp_path / "other", 5, width=4)
    trial = training_of("Own", evaluation=evaluation_on(other))
    with (
        pytest.raises(DataError, match=r"expected inputs as .* of shape \(3,\), got float32 .*4"),
        open_samples(trial.training, tmp_path, SoloNode()),
    ):
        pass
