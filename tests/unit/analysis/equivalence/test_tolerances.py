"""Allowed differences, where a baseline measured what rounding does to it."""

from __future__ import annotations

import pytest

from paceline.analysis.equivalence.tolerances import tolerance
from paceline.records.rows import RoundingChange

DERIVED = 2.0**-11


def changes(**by_point: tuple[float, float]) -> dict[str, RoundingChange]:
    return {p: RoundingChange(tensor=t, whole=w) for p, (t, w) in by_point.items()}


def test_insensitive_model_has_the_derived_tolerance() -> None:
    assert tolerance("fp32", "fp32", 3).gradient == DERIVED
    small = tolerance("fp32", "fp32", 3, rounding=changes(gradient=(1e-5, 1e-6)), global_batch=8)
    assert small.gradient == DERIVED
    assert small.of_whole(3, "final") == small.weights  # it measured no weights


def test_sensitive_model_may_differ_by_four_times_what_it_measured() -> None:
    rounding = changes(gradient=(1e-3, 1e-4))
    found = tolerance("fp32", "fp32", 2, rounding=rounding, global_batch=8)
    assert found.gradient == pytest.approx(4e-3)
    assert found.weights == pytest.approx(4 * 4e-3 * 2**2)
    assert found.loss == DERIVED  # a unit that is nearly zero does not change the loss


@pytest.mark.parametrize(("global_batch", "most"), [(8, 1 / 16), (64, 1 / 128), (4096, 1 / 128)])
def test_half_a_sample_or_one_in_128_is_the_most(global_batch: int, most: float) -> None:
    rounding = changes(gradient=(1.0, 1.0))
    found = tolerance("fp32", "fp32", 1, rounding=rounding, global_batch=global_batch)
    assert found.gradient == most


def test_low_precision_has_its_own_tolerance() -> None:
    rounding = changes(gradient=(1.0, 1.0), final=(1.0, 1e-9))
    found = tolerance("bf16", "bf16", 1, rounding=rounding, global_batch=8)
    assert found == tolerance("bf16", "bf16", 1)


def test_after_many_steps_weights_may_differ_by_a_quarter_of_the_update() -> None:
    allowed = tolerance("fp32", "fp32", 24)
    assert allowed.weights == 0.25
    # ranks that never exchange gradients differ by 0.71 of the update
    assert allowed.weights < 0.71


@pytest.mark.parametrize(
    ("whole", "limit"), [(1e-6, 1 / 128), (0.01, 0.08), (0.9, 0.25)], ids=["least", "eight", "most"]
)
def test_all_parameters_together_may_differ_by_what_rounding_does(
    whole: float, limit: float
) -> None:
    allowed = tolerance("fp32", "fp32", 20, rounding=changes(final=(0.5, whole)))
    assert allowed.of_whole(20, "final") == pytest.approx(limit)
    assert allowed.of_tensor(20) == 0.25
    assert limit < 0.71


def test_replayed_steps_may_be_more_sensitive_than_the_first_ones() -> None:
    allowed = tolerance("fp32", "fp32", 100, rounding=changes(replay50=(0.02, 1e-4)))
    assert allowed.of_tensor(2, "replay50") == pytest.approx(0.08)
    assert allowed.of_tensor(2, "replay98") == 16 * DERIVED
    assert allowed.of_whole(2, "replay50") == 1 / 128
