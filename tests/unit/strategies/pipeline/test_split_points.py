from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.strategies.pipeline.split_points import (
    balanced_split_points,
    stage_bounds,
)
from paceline.workloads.build import build_model, make_task
from paceline.workloads.facts import legal_split_points


@pytest.fixture
def layers():
    task = make_task("tiny", classes=3)
    return task.blocks(build_model(task))


def dearest(costs, crossing, split_points):
    ends = [0, *split_points, len(costs)]
    padded = [0, *crossing[1:], 0]
    return max(sum(costs[low:high]) + padded[low] + padded[high] for low, high in pairwise(ends))


@given(st.data())
def test_no_other_legal_cuts_are_better(data):
    costs = data.draw(st.lists(st.integers(0, 20), min_size=2, max_size=9))
    crossing = data.draw(st.lists(st.integers(0, 9), min_size=len(costs), max_size=len(costs)))
    places = data.draw(st.sets(st.integers(1, len(costs) - 1), min_size=1))
    stages = data.draw(st.integers(1, len(places) + 1))
    found = balanced_split_points(costs, stages, sorted(places), crossing)
    others = combinations(sorted(places), stages - 1)
    assert set(found) <= places
    assert len(found) == stages - 1
    assert dearest(costs, crossing, found) == min(dearest(costs, crossing, o) for o in others)


def test_cut_evens_out_the_stages():
    assert balanced_split_points([1, 1, 1, 3, 3, 3], 2, [1, 2, 3, 4, 5]) == [4]
    assert balanced_split_points([1, 1, 1, 3, 3, 3], 3, [1, 2, 3, 4, 5]) == [3, 4]


def test_cut_is_never_at_a_layer_that_works_in_place(layers):
    names = [layers[i][0] for i in legal_split_points(layers)]
    assert "features.1" not in names  # a ReLU
    assert {"features.2", "features.3", "avgpool", "flatten", "classifier.1"} <= set(names)
    assert legal_split_points(layers)[0] > 0


def test_stages_follow_one_another():
    assert stage_bounds([3, 5], 9) == [(0, 3), (3, 5), (5, 9)]


def test_layers_are_the_model_in_sequence(layers):
    model = build_model(make_task("tiny", classes=3, dropout=True, seed=1))
    names = [f"{name}.{p}" for name, layer in layers for p, _ in layer.named_parameters()]
    assert names == [name for name, _ in model.named_parameters()]
