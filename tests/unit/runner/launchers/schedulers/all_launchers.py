"""A spec with all launchers, for the tests of both schedulers."""

from __future__ import annotations

from tests.support.specs import spec_text

from paceline.plan.spec.loading import parse_spec
from paceline.plan.trials.planning import plan_trials
from paceline.plan.trials.trial import Trial

SPEC = spec_text(
    'launcher = "mpi"; local_strategy = "processes"; nodes = 2; ranks_per_node = 3; '
    "threads_per_rank = 2",
    'launcher = "torchrun"; local_strategy = "processes"; ranks_per_node = 2',
    'launcher = "spark"; local_strategy = "threads"; transport = "gloo"; nodes = 2; replicas = 2; '
    "threads_per_rank = 2",
    workload='name = "tiny"; global_batch = 36',
    tables='[network]; interface = "ib0"; [limits]; trial_s = 601; [spark]; '
    'conf = { "spark.executor.memory" = "3g", "spark.locality.wait" = "7s" }',
    name="nodes",
    repeats=3,
)


def planned(text: str = SPEC) -> list[Trial]:
    experiment = parse_spec(text, "test")
    return plan_trials(experiment, {str(w.name): "/d" for w in experiment.workloads}, 8)
