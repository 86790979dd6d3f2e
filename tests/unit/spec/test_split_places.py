"""The layers at which a spec may split a model are those of the model."""

import pytest

from paceline.spec.extensions import WORKLOADS
from paceline.strategies.pipeline.settings import model_faults
from paceline.strategies.pipeline.split_points import legal_split_points
from paceline.workloads.build import build_model

PLACES = WORKLOADS.get("tiny").split_places()


@pytest.mark.parametrize("name", WORKLOADS.names())
def test_places_are_those_of_the_model(name):
    workload = WORKLOADS.get(name)
    layers = build_model(workload.model, 2, dropout=True, seed=1).layers()
    assert list(workload.split_places()) == legal_split_points(layers)


def test_most_stages_are_one_more_than_the_places():
    assert list(model_faults("tiny-alexnet", PLACES, 13, None)) == []
    (fault,) = model_faults("tiny-alexnet", PLACES, 14, None)
    assert fault.endswith("has at most 13, got 14")


def test_split_at_a_layer_that_works_in_place_names_the_others():
    assert list(model_faults("tiny-alexnet", PLACES, 3, (3, 9))) == []
    (fault,) = model_faults("tiny-alexnet", PLACES, 3, (4, 9))
    assert "can begin at layer 2, 3, 5, " in fault
    assert fault.endswith(", got 4")
