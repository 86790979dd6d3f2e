from __future__ import annotations

import pytest
from tests.support.trials import changed

from paceline.plan.spec.extensions import STRATEGIES
from paceline.plan.spec.reduction import AVERAGED_IN_BUCKETS, NODE_SHARDS, StepReduction
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


AVERAGING = {"averaging": {"period_steps": 4}}


@pytest.mark.parametrize(
    ("name", "transport", "options", "expected"),
    [
        ("sequential", "none", {}, AVERAGED_IN_BUCKETS),
        ("intraop", "gloo", {}, AVERAGED_IN_BUCKETS),
        ("threads", "mpi", {}, NODE_SHARDS),
        ("processes", "shared", {}, NODE_SHARDS),
        ("processes", "gloo", {}, AVERAGED_IN_BUCKETS),
        ("processes", "mpi", {"reduction": "flat"}, AVERAGED_IN_BUCKETS),
        ("processes", "mpi", {"reduction": "hierarchical"}, NODE_SHARDS),
        ("processes", "mpi", {"reduction": "zero-1"},
         StepReduction(among="nodes", shards="all nodes")),
        ("processes", "mpi", {"reduction": "flat", **AVERAGING},
         StepReduction(sends="weights", among="ranks")),
        ("processes", "spark-rounds", AVERAGING, StepReduction(sends="weights", among="ranks")),
        ("sharded", "gloo", {},
         StepReduction(among="ranks", shards="all nodes", bytes_per_parameter=6.0)),
        ("pipeline", "shared", {"micro_batches": 2}, StepReduction(among="stages", shards="node")),
        ("hybrid", "shared", {"micro_batches": 2}, StepReduction(among="stages", shards="node")),
        ("pipeline", "shared", {"micro_batches": 2, "schedule": "pipedream"},
         StepReduction(among="stages", shards="node", updates="within step")),
        ("parameter-server", "gloo", {}, StepReduction(shards="all nodes", updates="by part")),
        ("hogwild", "shared", {}, StepReduction(updates="within step")),
    ],
)  # fmt: skip
def test_strategy_states_how_it_reduces(name, transport, options, expected):
    strategy = STRATEGIES.get(name)
    planned = strategy.Options.model_validate(options)
    assert strategy.reduction(transport, planned) == expected


def test_every_strategy_states_how_it_reduces():
    silent = StepReduction()
    for strategy in STRATEGIES.all():
        options = {"micro_batches": 2} if strategy.name in ("pipeline", "hybrid") else {}
        planned = strategy.Options.model_validate(options)
        assert strategy.reduction("gloo", planned) != silent, strategy.name
