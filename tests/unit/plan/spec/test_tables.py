"""[checkpoint] and the target of a spec."""

import pytest
from pydantic import ValidationError

from paceline.plan.spec.values import CheckpointSettings, Target


@pytest.mark.parametrize(
    "keys",
    [
        {"every_steps": 5},
        {"every_steps": 3, "keep": True},
    ],
)
def test_allowed(keys):
    CheckpointSettings.model_validate(keys)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"keep": True}, "every_steps\n  Field required"),
        ({"every_steps": 0}, "greater than or equal to 1"),
        ({"every_steps": 3, "every_s": 60}, "Extra inputs"),
    ],
)
def test_refused(keys, message):
    with pytest.raises(ValidationError, match=message):
        CheckpointSettings.model_validate(keys)


@pytest.mark.parametrize(
    ("bound", "met", "missed", "words"),
    [
        ({"at_least": 0.9}, 0.9, 0.89, "loss of at least 0.9"),
        ({"at_most": 0.9}, 0.9, 0.91, "loss of at most 0.9"),
    ],
)
def test_target_is_a_bound_that_may_be_met_exactly(bound, met, missed, words):
    target = Target(metric="loss", **bound)
    assert target.reached(met)
    assert not target.reached(missed)
    assert not target.reached(float("nan"))
    assert target.words == words
    for value in (float("nan"), float("inf")):
        with pytest.raises(ValidationError, match="finite number"):
            Target(metric="loss", **dict.fromkeys(bound, value))
