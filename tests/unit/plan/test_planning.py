import pytest

from paceline.errors import UsageError
from paceline.plan.planning import plan_trials
from paceline.plan.trial import Trial
from paceline.spec.loading import parse_spec

SPEC = """
schema = 1
name = "mine"
seed = 7
repeats = 3
[training]
max_steps = 10
learning_rate = 0.5
[[workloads]]
name = "tiny"
max_steps = 5
[[workloads]]
name = "simple-big"
[[trials]]
launcher = "local"
local_strategy = "sequential"
[[trials]]
launcher = "mpi"
local_strategy = "processes"
[[trials]]
launcher = "local"
local_strategy = "intraop"
precision = "bf16"
"""
DATA = {"tiny": "/data/tiny", "simple-big": "/data/big"}


def planned(cores: int = 4) -> list[Trial]:
    return plan_trials(parse_spec(SPEC, "test"), DATA, cores)


def test_every_repeat_holds_every_trial_once():
    trials = planned()
    blocks = [trials[i : i + 6] for i in range(0, 18, 6)]
    names = {t.configuration for t in trials}
    assert len(names) == 6
    for repeat, block in enumerate(blocks):
        assert {t.configuration for t in block} == names
        assert {t.repeat for t in block} == {repeat}


def test_order_is_the_seeds_and_differs_between_repeats():
    first, again = ([t.id for t in planned()] for _ in range(2))
    assert first == again
    assert [i[:-2] for i in first[:6]] != [i[:-2] for i in first[6:12]]


def test_names_are_stable_and_unique():
    ids = [t.id for t in planned()]
    assert len(set(ids)) == len(ids)
    assert "tiny.mpi.mpi.processes.n1r4t1.fp32.r0" in ids
    assert "simple-big.local.none.intraop.n1r1t4.bf16.r2" in ids


def test_nearest_value_wins():
    by_name = {t.id: t.training for t in planned()}
    tiny = by_name["tiny.local.none.sequential.n1r1t1.fp32.r0"]
    big = by_name["simple-big.local.none.sequential.n1r1t1.fp32.r0"]
    assert (tiny.max_steps, big.max_steps) == (5, 10)
    assert (tiny.learning_rate, big.learning_rate) == (0.5, 0.5)
    assert (tiny.global_batch, big.global_batch) == (32, 64)
    assert tiny.dataset == "/data/tiny"


def test_auto_takes_the_cores():
    place = {t.local_strategy: t.placement for t in planned(cores=8)}
    assert (place["processes"].ranks_per_node, place["processes"].threads_per_rank) == (8, 1)
    assert (place["intraop"].ranks_per_node, place["intraop"].threads_per_rank) == (1, 8)
    assert (place["sequential"].ranks_per_node, place["sequential"].threads_per_rank) == (1, 1)


def test_auto_that_does_not_divide_the_batch_is_refused_for_each_workload():
    with pytest.raises(UsageError) as raised:
        planned(cores=3)
    message = str(raised.value)
    assert "batch of 32 cannot be divided among 3 ranks" in message
    assert "batch of 64 cannot be divided among 3 ranks" in message


def test_trial_survives_json():
    for trial in planned():
        assert Trial.model_validate_json(trial.model_dump_json()) == trial


def test_only_the_sequential_local_trial_is_the_baseline():
    assert {t.configuration for t in planned() if t.is_baseline} == {
        "tiny.local.none.sequential.n1r1t1.fp32",
        "simple-big.local.none.sequential.n1r1t1.fp32",
    }
