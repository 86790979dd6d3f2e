from __future__ import annotations

import dataclasses
import tomllib

import pytest
from tests.support.trials import changed
from tests.unit.runner.tune.conftest import SPEC, local_space

from paceline.analysis.statistics.intervals import Interval
from paceline.plan.spec.loading import parse_spec
from paceline.plan.spec.models import WorkloadRequest
from paceline.plan.trials.planning import plan_trials
from paceline.runner.tune import session
from paceline.runner.tune.local import LOCAL_SEARCH
from paceline.runner.tune.search import Findings, TargetResult
from paceline.runner.tune.session import tuned_text
from paceline.runner.tune.spaces import SearchTarget

TWO_WORKLOADS = SPEC + '[[workloads]]\nname = "simple-big"\nglobal_batch = 64\n'
CORES = 4


def entry(launcher, strategy, **values):
    lines = [f"{key} = {value}" for key, value in values.items()]
    named = [f'launcher = "{launcher}"', f'local_strategy = "{strategy}"']
    return "\n".join(["[[trials]]", *named, *lines, ""])


class Case:
    """A spec, and findings in which any candidate may be made to win."""

    def __init__(self, text):
        self.experiment = parse_spec(text + "[tune]\noversubscribe = true\n", "mine.toml")
        self.found: list[TargetResult] = []

    def wins(self, workload_name, strategy, number, speed=10.0):
        """The candidate of that number (0 is the default) is the fastest, certainly."""
        space = local_space(self.experiment, workload_name, strategy, CORES)
        interval = Interval(estimate=speed, low=speed, high=speed)
        winner = space.candidates[number]
        default = number == 0
        self.found.append(
            TargetResult(
                target=SearchTarget(workload=workload_name, name=strategy),
                default=space.default,
                default_samples_per_s=interval if default else interval.scaled(0.5),
                fastest=winner,
                fastest_samples_per_s=interval,
                ratio=None if default else Interval(estimate=2, low=1.5, high=2.5),
                is_faster=not default,
                candidates=len(space.candidates),
                left_out=(),
                failures={},
                cut_short=False,
            )
        )
        return winner

    def tuned(self):
        findings = Findings(found=tuple(self.found))
        text = tuned_text(LOCAL_SEARCH, self.experiment, findings, CORES)
        return parse_spec(text, "tuned.toml")

    def planned(self):
        tuned = self.tuned()
        datasets = {w.name: "data" for w in tuned.workloads}
        return plan_trials(tuned.model_copy(update={"repeats": 1}), datasets, CORES)


def of(trials, strategy, launcher="local"):
    return [t for t in trials if (t.local_strategy, t.launcher) == (strategy, launcher)]


@pytest.mark.parametrize(
    "strategy", ["sequential", "intraop", "threads", "processes", "pipeline", "hybrid"]
)
def test_every_candidate_is_planned_again_from_what_the_tuned_spec_says(strategy):
    text = SPEC if strategy == "sequential" else SPEC + entry("local", strategy)
    numbers = range(len(local_space(Case(text).experiment, "tiny", strategy, CORES).candidates))
    for number in list(numbers)[:8]:
        case = Case(text)
        winner = case.wins("tiny", strategy, number)
        (planned,) = of(case.planned(), strategy)
        assert planned.configuration == winner.configuration


def test_rest_of_the_spec_stays_and_the_search_is_gone():
    others = "[limits]\ntrial_s = 77\n[spark.conf]\n'a.b' = '1'\n"
    case = Case(SPEC + entry("local", "processes") + others)
    case.wins("tiny", "processes", 1)
    tuned = case.tuned()
    assert tuned.limits == case.experiment.limits
    assert tuned.model_extra["spark"]["conf"] == {"a.b": "1"}
    assert tuned.workloads == case.experiment.workloads
    assert tuned.tune is None


def test_options_that_are_tables_stay_tables_of_their_workload():
    options = {"optimizer": {"lr": 0.1, "betas": [0.9, 0.99]}, "layers": [{"width": 3}] * 40}
    request = WorkloadRequest(name="mine", task="my_task.py:Mine", options=options)
    assert tomllib.loads(session._entry("workloads", request))["workloads"] == [
        {"name": "mine", "task": "my_task.py:Mine", "options": options}
    ]


def test_winners_that_differ_by_workload_become_trials_of_their_own():
    case = Case(TWO_WORKLOADS + entry("local", "processes"))
    first = case.wins("tiny", "processes", 0)
    second = case.wins("simple-big", "processes", 1)
    assert first.placement != second.placement
    requests = [t for t in case.tuned().trials if t.local_strategy == "processes"]
    assert [(t.workloads, t.ranks_per_node) for t in requests] == [
        (("tiny",), first.placement.ranks_per_node),
        (("simple-big",), second.placement.ranks_per_node),
    ]
    assert {t.configuration for t in of(case.planned(), "processes")} == {
        first.configuration,
        second.configuration,
    }


def test_winners_that_agree_stay_one_trial():
    case = Case(TWO_WORKLOADS + entry("local", "processes"))
    case.wins("tiny", "processes", 1)
    case.wins("simple-big", "processes", 1)
    (request,) = [t for t in case.tuned().trials if t.local_strategy == "processes"]
    assert request.workloads is None


def test_best_is_the_fastest_strategy_of_each_workload():
    case = Case(TWO_WORKLOADS + entry("mpi", "best"))
    case.wins("tiny", "threads", 1, speed=20)
    case.wins("tiny", "pipeline", 3, speed=10)
    case.wins("simple-big", "threads", 1, speed=10)
    winner = case.wins("simple-big", "pipeline", 3, speed=20)
    trials = [t for t in case.planned() if t.launcher == "mpi"]
    assert {(t.training.workload, t.local_strategy) for t in trials} == {
        ("tiny", "threads"),
        ("simple-big", "pipeline"),
    }
    (pipeline,) = of(trials, "pipeline", "mpi")
    assert pipeline.strategy_options == winner.strategy_options


def test_best_that_is_there_under_its_own_name_is_not_run_twice():
    text = SPEC + entry("mpi", "best") + entry("mpi", "processes") + entry("mpi", "hybrid")
    case = Case(text)
    case.wins("tiny", "processes", 1, speed=20)
    case.wins("tiny", "hybrid", 0)
    assert sorted(t.local_strategy for t in case.planned()) == ["hybrid", "processes", "sequential"]


def test_winner_whose_strategy_no_trial_has_becomes_a_trial():
    case = Case(SPEC + entry("mpi", "processes"))
    winner = case.wins("tiny", "threads", 1, speed=20)
    case.wins("tiny", "processes", 1, speed=10)
    (planned,) = of(case.planned(), "threads")
    assert planned.configuration == winner.configuration


def test_trial_that_says_its_own_layout_is_left_alone():
    case = Case(SPEC + entry("local", "processes", ranks_per_node=4))
    case.wins("tiny", "processes", 1)
    (request,) = [t for t in case.tuned().trials if t.local_strategy == "processes"]
    assert (request.ranks_per_node, request.threads_per_rank) == (4, "auto")


def test_strategy_that_was_not_searched_is_left_alone():
    case = Case(SPEC + entry("local", "processes"))
    case.wins("tiny", "sequential", 0)
    (request,) = [t for t in case.tuned().trials if t.local_strategy == "processes"]
    assert request.ranks_per_node == "auto"


def test_default_is_kept_where_the_winner_is_not_faster():
    case = Case(SPEC + entry("local", "processes"))
    case.wins("tiny", "processes", 1)
    (found,) = case.found
    case.found = [dataclasses.replace(found, is_faster=False)]
    (planned,) = of(case.planned(), "processes")
    assert planned.configuration == found.default.configuration


def test_micro_batches_shrink_to_what_a_replica_gets_of_several_nodes():
    text = SPEC + entry("mpi", "pipeline", nodes=8) + '[network]\ninterface = "eth0"\n'
    case = Case(text)
    space_winner = next(
        number
        for number in range(1, 16)
        if Case(text).wins("tiny", "pipeline", number).option("micro_batches") == 16
    )
    winner = case.wins("tiny", "pipeline", space_winner)
    (planned,) = of(case.planned(), "pipeline", "mpi")
    assert winner.option("micro_batches") == 16
    assert planned.option("micro_batches") == 32 // 8  # tiny has 32 samples a step
    assert planned.placement.nodes == 8


def test_explicit_cuts_are_kept():
    text = SPEC + entry("local", "pipeline")
    number = next(
        n for n in range(1, 16) if Case(text).wins("tiny", "pipeline", n).placement.stages == 2
    )
    case = Case(text)
    winner = case.wins("tiny", "pipeline", number)
    (found,) = case.found
    moved = changed(winner, balance=None, split_points=(5,))
    case.found = [dataclasses.replace(found, fastest=moved)]
    assert moved.layout_keys["split_points"] == (5,)
    (planned,) = of(case.planned(), "pipeline")
    assert planned.strategy_options == moved.strategy_options
