"""The number of stages and the split points must suit the model."""

from paceline.strategies.pipeline.descriptor import model_faults

PLACES = (2, 3, 5, 6, 8, 9, 10, 11, 12, 14, 15, 17)  # of tiny-alexnet


def test_most_stages_are_one_more_than_the_places():
    assert list(model_faults("tiny-alexnet", PLACES, 13, None)) == []
    (fault,) = model_faults("tiny-alexnet", PLACES, 14, None)
    assert fault.endswith("has at most 13, got 14")


def test_split_at_a_layer_that_works_in_place_names_the_others():
    assert list(model_faults("tiny-alexnet", PLACES, 3, (3, 9))) == []
    (fault,) = model_faults("tiny-alexnet", PLACES, 3, (4, 9))
    assert "can begin at layer 2, 3, 5, " in fault
    assert fault.endswith(", got 4")
