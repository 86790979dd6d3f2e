"""Allowed differences, where a baseline measured what rounding does to it."""

from __future__ import annotations

import pytest

from paceline.analysis.equivalence.tolerances import tolerance

DERIVED = 2.0**-11


def test_insensitive_model_has_the_derived_tolerance() -> None:
    assert tolerance("fp32", "fp32", 3).gradient == DERIVED
    small = tolerance("fp32", "fp32", 3, rounding={"gradient": 1e-5}, global_batch=8)
    assert small.gradient == DERIVED


def test_sensitive_model_may_differ_by_four_times_what_it_measured() -> None:
    rounding = {"gradient": 1e-3}
    found = tolerance("fp32", "fp32", 2, rounding=rounding, global_batch=8)
    assert found.gradient == pytest.approx(4e-3)
    assert found.weights == pytest.approx(4 * 4e-3 * 2**2)
    assert found.loss == DERIVED  # a unit that is nearly zero does not change the loss


@pytest.mark.parametrize(("global_batch", "most"), [(8, 1 / 16), (64, 1 / 128), (4096, 1 / 128)])
def test_half_a_sample_or_one_in_128_is_the_most(global_batch: int, most: float) -> None:
    rounding = {"gradient": 1.0}
    found = tolerance("fp32", "fp32", 1, rounding=rounding, global_batch=global_batch)
    assert found.gradient == most


def test_low_precision_has_its_own_tolerance() -> None:
    assert tolerance("bf16", "bf16", 1).gradient == 2.0**-4
    assert tolerance("fp16", "fp16", 1).gradient == 2.0**-6
    sensitive = tolerance("fp16", "fp16", 1, rounding={"gradient": 0.01}, global_batch=8)
    assert sensitive.gradient == pytest.approx(0.04)
    # what an fp32 baseline measured says nothing about fp16
    assert tolerance("fp16", "fp32", 1, rounding={"gradient": 1.0}).gradient == 2.0**-4


def test_after_many_steps_weights_may_differ_by_a_quarter_of_the_update() -> None:
    allowed = tolerance("fp32", "fp32", 24)
    assert allowed.weights == 0.25
    # ranks that never exchange gradients differ by 0.71 of the update
    assert allowed.weights < 0.71


@pytest.mark.parametrize(("change", "judged"), [(0.06, True), (0.07, False)])
def test_weights_prove_nothing_where_rounding_alone_may_move_them_so_far(
    change: float, *, judged: bool
) -> None:
    allowed = tolerance("fp32", "fp32", 40, rounding={"final": change})
    assert allowed.weights_judged is judged
    assert not tolerance("fp32", "fp32", 65).weights_judged


@pytest.mark.parametrize(("change", "limit"), [(1e-5, 1 / 16), (0.02, 0.08), (0.9, 0.25)])
def test_replayed_steps_may_be_more_sensitive_than_the_first_ones(
    change: float, limit: float
) -> None:
    allowed = tolerance("fp32", "fp32", 100, rounding={"replay50": change})
    assert allowed.of_replay("replay50") == pytest.approx(limit)
    assert allowed.of_replay("replay98") == 1 / 16
