"""Data sets are checked before any rank starts: fields, classes, access."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.support.s3 import s3_server

from paceline.base.errors import EnvironmentLacks, UsageError
from paceline.plan.spec import descriptors
from paceline.plan.spec.model_facts import ModelFacts
from paceline.plan.spec.models import Experiment
from paceline.runner.trials.planning import make_datasets
from paceline.train.data.register import register


@pytest.fixture
def dataset(tmp_path):
    """A registered data set with the fields `image`, which are lists, and `label`."""
    folder = tmp_path / "set"
    folder.mkdir()
    lists = pa.array(np.zeros((9, 2)).tolist(), pa.list_(pa.float32()))
    pq.write_table(pa.table({"image": lists, "label": np.arange(9) - 4}), folder / "a.parquet")
    register(folder)
    return str(folder)


@pytest.fixture
def experiment_of(monkeypatch):
    """Makes an experiment with one workload, whose task needs the fields `image` and `weight`."""
    facts = ModelFacts(
        parameters=1, parameter_bytes=4, split_points=(), input_field="image", target_field="weight"
    )
    monkeypatch.setattr(descriptors, "model_facts", lambda *_: facts)

    def make(**workload: Any) -> Experiment:
        trial = {"launcher": "local", "local_strategy": "sequential"}
        return Experiment.model_validate(
            {"schema": 2, "name": "e", "workloads": [workload], "trials": [trial]}
        )

    return make


def test_a_field_that_the_task_needs_but_the_data_lack(experiment_of, dataset):
    experiment = experiment_of(name="mine", task="mine.py:Mine", data=dataset)
    with pytest.raises(UsageError, match=r'expected a field "weight", found image .*, label \('):
        make_datasets(experiment, None)


def test_a_built_in_workload_needs_classes(experiment_of, dataset):
    with pytest.raises(UsageError, match=r"tiny classifies images, .* in the field label \(int64"):
        make_datasets(experiment_of(name="tiny", data=dataset), None)


def test_a_bucket_without_credentials(experiment_of, monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/nonexistent")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with s3_server() as server:
        experiment = experiment_of(name="mine", task="mine.py:Mine", data=server.url("set"))
        with pytest.raises(EnvironmentLacks, match="access was denied; expected credentials"):
            make_datasets(experiment, None)
