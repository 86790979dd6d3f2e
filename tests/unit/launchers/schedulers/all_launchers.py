"""A spec with all launchers, for the tests of both schedulers."""

from __future__ import annotations

from paceline.plan.planning import plan_trials
from paceline.plan.trial import Trial
from paceline.spec.loading import parse_spec

SPEC = """
schema = 2
name = "nodes"
repeats = 3
[network]
interface = "ib0"
[[workloads]]
name = "tiny"
global_batch = 36
[[trials]]
launcher = "local"
local_strategy = "sequential"
[[trials]]
launcher = "mpi"
local_strategy = "processes"
nodes = 2
ranks_per_node = 3
threads_per_rank = 2
[[trials]]
launcher = "torchrun"
local_strategy = "processes"
ranks_per_node = 2
[[trials]]
launcher = "spark"
local_strategy = "threads"
transport = "gloo"
nodes = 2
replicas = 2
threads_per_rank = 2
[spark]
conf = { "spark.executor.memory" = "3g", "spark.locality.wait" = "7s" }
[limits]
trial_s = 601
"""


def planned(text: str = SPEC) -> list[Trial]:
    experiment = parse_spec(text, "test")
    return plan_trials(experiment, {str(w.name): "/d" for w in experiment.workloads}, 8)
