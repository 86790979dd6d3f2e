from __future__ import annotations

import pytest
from tests.support.trials import changed

from paceline.train.strategies import create_strategy
from paceline.train.strategies.ddp import DdpStrategy
from paceline.train.strategies.pipeline.descriptor import PipelineOptions
from paceline.train.strategies.shared_shards import SharedShardsStrategy
from paceline.train.strategies.threads import ThreadsStrategy


@pytest.mark.parametrize(
    ("name", "transport", "reduction", "kind"),
    [
        ("sequential", "none", None, DdpStrategy),
        ("intraop", "gloo", None, DdpStrategy),
        ("threads", "none", None, ThreadsStrategy),
        ("threads", "mpi", None, ThreadsStrategy),
        ("processes", "shared", None, SharedShardsStrategy),
        ("processes", "gloo", None, DdpStrategy),
        ("processes", "gloo", "flat", DdpStrategy),
        ("processes", "mpi", "hierarchical", SharedShardsStrategy),
        ("processes", "gloo", "zero-1", SharedShardsStrategy),
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
