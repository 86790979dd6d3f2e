from __future__ import annotations

import pytest
from tests.support.trials import changed

from paceline.train.strategies import create_strategy
from paceline.train.strategies.pipeline.descriptor import PipelineOptions
from paceline.train.strategies.processes import ProcessesStrategy
from paceline.train.strategies.replica import ReplicaStrategy
from paceline.train.strategies.threads import ThreadsStrategy


@pytest.mark.parametrize(
    ("name", "transport", "reduction", "kind"),
    [
        ("sequential", "none", None, ReplicaStrategy),
        ("intraop", "gloo", None, ReplicaStrategy),
        ("threads", "none", None, ThreadsStrategy),
        ("threads", "mpi", None, ThreadsStrategy),
        ("processes", "shared", None, ProcessesStrategy),
        ("processes", "gloo", None, ReplicaStrategy),
        ("processes", "gloo", "flat", ReplicaStrategy),
        ("processes", "mpi", "hierarchical", ProcessesStrategy),
        ("processes", "gloo", "zero-1", ProcessesStrategy),
    ],
)
def test_strategy_is_chosen_by_name_transport_and_reduction(
    make_trial, name, transport, reduction, kind
):
    options = {} if reduction is None else {"reduction": reduction}
    trial = changed(make_trial(), local_strategy=name, transport=transport, **options)
    assert type(create_strategy(trial)) is kind


@pytest.mark.parametrize(
    ("name", "schedule", "kind"),
    [
        ("pipeline", "1f1b", "PipelineStrategy"),
        ("hybrid", "gpipe", "PipelineStrategy"),
        ("pipeline", "pipedream", "PipeDreamStrategy"),
    ],
)
def test_stages_have_a_strategy_of_their_own(make_trial, name, schedule, kind):
    options = PipelineOptions(micro_batches=2, schedule=schedule)
    changes = {"local_strategy": name, "transport": "shared", "strategy_options": options}
    trial = make_trial().model_copy(update=changes)
    assert type(create_strategy(trial)).__name__ == kind
