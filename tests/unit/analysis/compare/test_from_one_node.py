"""Predictions from one node see no trial on several, and name what they need and do not have."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.unit.analysis import fabricate
from tests.unit.analysis.fabricate import INTRAOP, SEQUENTIAL, THREADS, Case, Way, on_nodes

from paceline.analysis.compare.from_one_node import FromOneNode, PredictedSpeedup
from paceline.analysis.compare.local_global import LocalGlobal
from paceline.analysis.compare.run import compare_run
from paceline.measure.records.layout import RunFiles

PROCESSES = dataclasses.replace(fabricate.PROCESSES, forward_s=0.08, backward_s=0.16)
LOCAL = (SEQUENTIAL, INTRAOP, THREADS, PROCESSES)
CASE = Case(parameters=50_000)  # 2 ms at 1 Gbit/s
STEP = "the step of one node with {} samples was not measured (`paceline predict --measure`)"
WITHIN_S = {"threads": 0.012, "processes": 0.008}  # sums of one node, in each step


def _there(way: Way, nodes: int = 2, exchange_s: float = 0.001, **changes: Any) -> Way:
    took_s = WITHIN_S.get(way.local_strategy, 0.0) + exchange_s
    return on_nodes(way, nodes, **{"link": "1gbit", "transfer_s": took_s, **changes})


def _run(root: Path, ways: Sequence[Way], jitter: float = 0.01) -> RunFiles:
    """Draw a run with noise between its steps and between its repeats."""
    return fabricate.make_run(root, ways, cases=[CASE], repeats=3, jitter=jitter)


def _compared(run: RunFiles) -> LocalGlobal:
    (found,) = compare_run(run).local_global
    return found


def _found(
    root: Path, several: Sequence[Way], alone: Sequence[Way] = LOCAL, jitter: float = 0.01
) -> FromOneNode:
    """Compare a run in which one node has measured its half of the batch, too."""
    run = _run(root, [*alone, *several], jitter)
    fabricate.make_half_batch(run, alone, CASE, repeats=3, jitter=jitter)
    return _compared(run).from_one_node


def _named(found: FromOneNode, strategy: str) -> PredictedSpeedup:
    return next(each for each in found.speedups if _kind(each.configuration) == strategy)


def _kind(configuration: str) -> str:
    return configuration.split(".")[3]


def test_speedups_are_predicted_with_the_interval_of_the_measured_ratio(tmp_path: Path) -> None:
    found = _found(tmp_path, [_there(way) for way in LOCAL])
    assert len(found.speedups) == len(LOCAL)
    for each in found.speedups:
        assert each.reason is None
        assert each.error.estimate == pytest.approx(1, abs=0.04)
        assert each.error.estimate == pytest.approx(
            each.predicted.estimate / each.measured.estimate
        )
        assert each.error.low == pytest.approx(each.predicted.estimate / each.measured.high)
        assert each.error.high == pytest.approx(each.predicted.estimate / each.measured.low)
        assert each.is_within
    # 0.635 s a step with 8 samples, 0.335 s with 4
    assert _named(found, "sequential").predicted.estimate == pytest.approx(1.88, rel=0.03)


def test_trials_on_several_nodes_are_held_out(tmp_path: Path) -> None:
    quick, slow = (
        _found(tmp_path / f"{seconds}", [_there(way, exchange_s=seconds) for way in LOCAL])
        for seconds in (0.001, 0.3)
    )
    for way in LOCAL:
        before, after = (_named(found, way.local_strategy) for found in (quick, slow))
        assert after.predicted.estimate == pytest.approx(before.predicted.estimate, rel=0.01)
        assert after.error.estimate > 1.5 * before.error.estimate
        assert not after.is_within


def test_right_choice_is_the_one_that_was_measured_fastest(tmp_path: Path) -> None:
    [choice] = _found(tmp_path, [_there(way) for way in LOCAL]).choices
    assert (_kind(choice.chosen), _kind(choice.fastest)) == ("processes", "processes")
    assert (choice.is_right, choice.not_separated, choice.ahead) == (True, (), None)


def test_wrong_choice_says_how_much_faster_another_is(tmp_path: Path) -> None:
    several = [*map(_there, LOCAL[:3]), _there(PROCESSES, exchange_s=0.2)]
    [choice] = _found(tmp_path, several).choices
    assert (_kind(choice.chosen), _kind(choice.fastest)) == ("processes", "intraop")
    assert choice.is_right is False
    # 0.363 s a step and 0.201 s
    assert choice.ahead.estimate == pytest.approx(0.363 / 0.201, rel=0.03)
    assert choice.ahead.low > 1


def test_choice_among_those_that_are_not_separated_is_undecided(tmp_path: Path) -> None:
    twin = dataclasses.replace(
        PROCESSES, local_strategy="threads", transport="none", ranks=1, threads=2,
        thread_replicas=2,
    )  # fmt: skip
    alone = (SEQUENTIAL, PROCESSES, twin)
    several = [_there(SEQUENTIAL), *(_there(way, transfer_s=0.01) for way in alone[1:])]
    [choice] = _found(tmp_path, several, alone, jitter=0.05).choices
    assert choice.is_right is None
    both = {_kind(name) for name in (choice.fastest, *choice.not_separated)}
    assert both == {"processes", "threads"}
    assert _kind(choice.chosen) in both


def test_strategy_that_did_not_run_on_one_node_is_named(tmp_path: Path) -> None:
    found = _found(tmp_path, [*map(_there, LOCAL[:3])], LOCAL[:2])
    missing = _named(found, "threads")
    assert (missing.alone, missing.predicted, missing.error) == (None, None, None)
    assert missing.reason == "there is no trial on one node"
    assert missing.measured.estimate > 1
    [choice] = found.choices
    assert _kind(choice.fastest) == "intraop"


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        ({}, STEP.format(4)),
        ({"nodes": 4}, STEP.format(2)),
        ({"link": None}, "the rate of the link was not recorded"),
        ({"transport": "nccl"}, "time between nodes has no model"),
    ],
)
def test_what_was_not_measured_is_named_in_place_of_a_number(
    tmp_path: Path, place: dict[str, Any], reason: str
) -> None:
    ways = LOCAL[:2]
    found = _compared(_run(tmp_path, [*ways, *(_there(way, **place) for way in ways)]))
    assert {each.reason for each in found.from_one_node.speedups} == {reason}
    assert not any(each.predicted or each.error for each in found.from_one_node.speedups)
    assert found.from_one_node.choices == ()


def test_factors_that_only_several_nodes_send_are_named(tmp_path: Path) -> None:
    run = _run(tmp_path, [*LOCAL[:2], *map(_there, LOCAL[:2])])
    for _, files in run.trials():
        result = json.loads(files.result.read_text())
        layers = [{"layer": "fc", "sends_factors": ".n2" in files.root.name}]
        result["communication"]["sufficient_factors"] = {"layers": layers}
        files.result.write_text(json.dumps(result))
    reason = "which layers send factors is known on several nodes only"
    assert {each.reason for each in _compared(run).from_one_node.speedups} == {reason}
