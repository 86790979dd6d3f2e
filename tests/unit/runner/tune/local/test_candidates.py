from tests.unit.runner.tune.conftest import SPEC

from paceline.plan.spec.loading import parse_spec
from paceline.plan.trials.planning import repeated
from paceline.runner.tune.local import searched_strategies
from paceline.runner.tune.spaces import short_experiment

HYBRID = """
[[trials]]
launcher = "local"
local_strategy = "hybrid"
oversubscribe = true
"""
BEST = """
[[trials]]
launcher = "mpi"
local_strategy = "best"
"""


def parsed(text):
    return parse_spec(text, "mine.toml")


def test_default_is_first_and_counted_once(make_space):
    space = make_space("processes", cores=4)
    assert space.default is space.candidates[0]
    # the default is a rank a core, which the split 4 x 1 is, too
    assert [t.configuration.split(".")[4] for t in space.candidates] == ["n1r4t1", "n1r2t2"]


def test_split_that_does_not_divide_the_batch_is_left_out_with_the_reason(make_space):
    spec = SPEC.replace('name = "tiny"', 'name = "tiny"\nglobal_batch = 6')
    space = make_space("processes", cores=4, spec=spec)
    assert [t.placement.ranks for t in space.candidates] == [3, 2]
    assert space.default is space.candidates[0]
    assert [o.what for o in space.left_out] == ["ranks_per_node=4 threads_per_rank=1"]
    assert all("6 cannot be divided among 4" in o.reason for o in space.left_out)


def test_hybrid_on_two_cores_is_left_out_unless_cores_may_be_shared(make_space):
    space = make_space("hybrid", cores=2)
    assert space.candidates == ()
    assert "wants 4 cores, this node has 2; oversubscribe = true" in space.left_out[0].reason
    allowed = make_space("hybrid", cores=2, tune="oversubscribe = true")
    asked = make_space("hybrid", cores=2, spec=SPEC + HYBRID)
    assert allowed.candidates == asked.candidates
    assert {t.placement.ranks for t in allowed.candidates} == {4}
    assert all(t.placement.oversubscribe for t in allowed.candidates)


def test_no_more_candidates_than_asked_and_the_same_ones_every_time(make_space):
    few = make_space("pipeline", tune="max_candidates = 5")
    every = make_space("pipeline")
    assert len(every.candidates) == 16
    assert len(few.candidates) == 5
    assert few.default == every.default
    assert {t.id for t in few.candidates} < {t.id for t in every.candidates}
    assert few == make_space("pipeline", tune="max_candidates = 5")
    assert few.left_out[0].what == "11 others"


def test_repeats_that_the_run_decides_leave_no_candidate_out(make_space):
    automatic = 'repeats = "auto"\nmax_repeats = 5\ntie_margin = 0.1\n'
    spec = SPEC.replace("[[workloads]]", f"{automatic}limits.run_s = 60\n[[workloads]]", 1)
    found, usual = make_space("intraop", spec=spec), make_space("intraop")
    assert [c.id for c in found.candidates] == [c.id for c in usual.candidates]
    assert found.candidates
    assert found.left_out == usual.left_out


def test_short_trials_have_the_steps_of_the_search(make_space):
    training = make_space("intraop", tune="steps = 6\nwarmup_steps = 3").candidates[0].training
    assert (training.max_steps, training.warmup_steps) == (9, 3)
    assert training.epochs >= 9  # however few photos there are


def test_steps_of_the_search_come_before_those_of_the_spec():
    text = SPEC.replace('name = "tiny"', 'name = "tiny"\nmax_steps = 50')
    experiment = parsed(text + "[training]\nepochs = 2\n[tune]\nsteps = 6\n")
    (workload,) = short_experiment(experiment, experiment.tune).workloads
    assert (workload.max_steps, workload.epochs) == (8, 8)


def test_strategies_are_those_of_the_trials():
    experiment = parsed(SPEC + HYBRID + "[tune]\n")
    assert searched_strategies(experiment, experiment.tune) == ["sequential", "hybrid"]


def test_strategies_are_all_where_the_best_is_wanted():
    experiment = parsed(SPEC + BEST + "[tune]\n")
    assert len(searched_strategies(experiment, experiment.tune)) == 6


def test_strategies_that_the_table_names_are_searched_beside_the_baseline():
    experiment = parsed(SPEC + BEST + '[tune]\nstrategies = ["threads", "intraop"]\n')
    strategies = searched_strategies(experiment, experiment.tune)
    assert strategies == ["sequential", "intraop", "threads"]


def test_repeats_are_told_apart_by_name(make_space):
    trial = make_space("intraop").candidates[0]
    assert repeated(trial, 3).id == f"{trial.configuration}.r3"
    assert repeated(trial, 3).repeat == 3
