"""Plans of the shipped experiments on nodes of all sizes."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from paceline.base.errors import EnvironmentLacks
from paceline.plan.spec.extensions import STRATEGIES
from paceline.plan.spec.loading import load_spec, shipped_experiments
from paceline.plan.spec.values import BASELINE
from paceline.plan.spec.workloads import workload_of
from paceline.plan.trials.trial import Trial
from paceline.runner.lab.record import NAME_VARIABLE
from paceline.runner.trials.planning import Planned, planned_trials

CORES = (1, 2, 4, 8, 16, 32, 64, 128)
FIXED = [name for name in shipped_experiments() if load_spec(name).experiment.tune is None]


def planned(source: Any, cores: int) -> Planned:
    spec = load_spec(source)
    return planned_trials(spec, {w.name: "/data" for w in spec.experiment.workloads}, cores)


def check(plan: Planned, cores: int) -> None:
    """Check that each trial fits, and that each configuration is planned or has its reason."""
    requested = sum(
        1 if trial.workloads is not None and len(trial.workloads) == 1
        else len(trial.workloads or plan.experiment.workloads)
        for trial in plan.experiment.trials
    )  # fmt: skip
    configurations = {trial.configuration for trial in plan.trials}
    assert len(configurations) + len(plan.left_out) == requested
    assert any(trial.is_baseline for trial in plan.trials)
    for trial in plan.trials:
        fits(trial, plan, cores)


def fits(trial: Trial, plan: Planned, cores: int) -> None:
    place, batch = trial.placement, trial.training.global_batch
    assert place.cores_per_node <= cores or place.oversubscribe or place.nodes > 1
    assert batch % place.replicas == 0
    [workload] = [w for w in plan.experiment.workloads if w.name == trial.training.workload]
    if place.stages > 1:
        assert place.stages <= len(workload_of(workload).facts().split_points) + 1


@pytest.mark.parametrize("cores", CORES)
@pytest.mark.parametrize("name", FIXED)
def test_shipped_experiment_plans_on(name: str, cores: int) -> None:
    check(planned(name, cores), cores)


@pytest.mark.parametrize("cores", CORES)
@pytest.mark.parametrize("launcher", ["local", "torchrun", "mpi", "spark"])
def test_strategies_with_counts_from_the_cores_plan_under(launcher: str, cores: int) -> None:
    trials = [BASELINE] + [
        {"launcher": launcher, "local_strategy": name, "oversubscribe": name == "hybrid"}
        for name in ("intraop", "threads", "processes", "pipeline", "hybrid")
        if launcher != "torchrun" or STRATEGIES.get(name).has_peers_on_node
    ]
    workloads = [{"name": "complex-small", "global_batch": 16}, {"name": "simple-big"}]
    document = {"schema": 2, "name": "sizes", "workloads": workloads, "trials": trials}
    plan = planned(document, cores)
    check(plan, cores)
    if cores >= 2:
        assert not plan.left_out


@pytest.mark.parametrize("nodes", range(1, 17))
def test_matrix_of_strategies_plans_on_several_nodes(nodes: int) -> None:
    document = tomllib.loads(load_spec("strategies").text)
    document["network"] = {"interface": "eth0"}
    document["training"]["global_batch"] = 2 * 16 * nodes
    for trial in document["trials"]:
        if trial["launcher"] != "local":
            trial["nodes"] = nodes
    plan = planned(document, 4)
    check(plan, 4)
    assert {t.placement.nodes for t in plan.trials} == {1, nodes}
    assert not plan.left_out


def test_what_the_cores_do_not_allow_is_left_out_with_its_reason() -> None:
    plan = planned("quickstart", 1)
    assert {trial.local_strategy for trial in plan.trials} == {"sequential"}
    assert len(plan.left_out) == 8
    assert all("cores on a node, there are 1 here" in reason for reason in plan.left_out)


def test_nothing_is_planned_if_no_selected_configuration_is_left() -> None:
    document = tomllib.loads(load_spec("quickstart").text)
    document["baseline"] = "*.mpi.*"
    with pytest.raises(EnvironmentLacks, match="need 2 cores on a node, there are 1"):
        planned(document, 1)


def test_configuration_that_the_cores_make_equal_to_an_earlier_one_is_left_out() -> None:
    trials = [
        BASELINE,
        {"launcher": "local", "local_strategy": "processes"},
        {"launcher": "local", "local_strategy": "processes", "ranks_per_node": 4},
    ]
    workloads = [{"name": "tiny", "global_batch": 32}]
    document = {"schema": 2, "name": "equal", "workloads": workloads, "trials": trials}
    assert not planned(document, 8).left_out
    plan = planned(document, 4)
    assert ["as an earlier one" in reason for reason in plan.left_out] == [True]


def test_rates_of_links_are_left_out_where_no_lab_sets_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(NAME_VARIABLE, raising=False)
    reasons = planned("local-global", 2).left_out
    assert len(reasons) == 3
    assert all("between hosts of a lab only (`paceline lab run SPEC`)" in each for each in reasons)
    monkeypatch.setenv(NAME_VARIABLE, "lab")
    plan = planned("local-global", 2)
    assert not plan.left_out
    assert len({trial.configuration for trial in plan.trials}) == len(plan.experiment.trials)
    assert {trial.link for trial in plan.trials} == {None, "100mbit"}


def test_ranks_for_which_the_listed_hosts_have_no_slots_are_left_out(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("one slots=1\ntwo slots=1\n", "utf-8")
    document = tomllib.loads(load_spec("horovod-mirrored").text)
    document["mpi"] = {"hostfile": str(hosts)}
    plan = planned(document, 2)
    assert len(plan.left_out) == 2
    expected = r"expected 2 slots on each of 1 node\(s\), 0 of its hosts have them"
    assert all(re.search(expected, reason) for reason in plan.left_out)
    assert {trial.placement.nodes for trial in plan.trials} == {1, 2}
    hosts.write_text("one slots=2\n", "utf-8")
    reasons = planned(document, 2).left_out
    assert ["at least 2 nodes, found 1 (one)" in reason for reason in reasons] == 3 * [True]


def test_hostfile_that_cannot_be_read_leaves_nothing_out(tmp_path: Path) -> None:
    document = tomllib.loads(load_spec("horovod-mirrored").text)
    document["mpi"] = {"hostfile": str(tmp_path / "none")}
    assert not planned(document, 2).left_out
