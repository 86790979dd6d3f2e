"""The places that a spec may cut at are those of the models."""

from typing import get_args

import pytest

from paceline.errors import UsageError
from paceline.spec.split_places import SPLIT_PLACES, check_stages
from paceline.spec.workloads import ModelName
from paceline.strategies.pipeline.split_points import legal_split_points
from paceline.workloads.build import build_model


@pytest.mark.parametrize("model", get_args(ModelName))
def test_places_are_those_of_the_model(model):
    layers = build_model(model, 2, dropout=True, seed=1).layers()
    assert list(SPLIT_PLACES[model]) == legal_split_points(layers)


def test_most_stages_are_one_more_than_the_places():
    check_stages("tiny-alexnet", 13, None)
    with pytest.raises(UsageError, match="has at most 13, got 14"):
        check_stages("tiny-alexnet", 14, None)


def test_cut_at_a_layer_that_works_in_place_names_the_others():
    check_stages("tiny-alexnet", 3, (3, 9))
    with pytest.raises(UsageError, match=r"can begin at layer 2, 3, 5, .*, got 4$"):
        check_stages("tiny-alexnet", 3, (4, 9))
