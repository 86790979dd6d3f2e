"""Measured on a made-up clock, decided by arithmetic."""

from __future__ import annotations

import copy

import pytest

from paceline.collectives.mpi import all_reduce
from paceline.collectives.mpi.all_reduce import Bin, Choice, Curve, calibrate, decide

KIB, MIB = 2**10, 2**20


class Link:
    """Algorithms that take a latency and a time per byte, on a clock that only they move."""

    def __init__(self, costs: dict[str, tuple[float, float]]) -> None:
        self.now = 0.0
        self.costs = costs
        self.calls: list[tuple[str, int]] = []

    def run(self, name: str, size_bytes: int) -> None:
        latency, per_byte = self.costs[name]
        self.now += latency + per_byte * size_bytes
        self.calls.append((name, size_bytes))

    def calibrate(self) -> Choice:
        return calibrate(list(self.costs), self.run, copy.deepcopy, self.clock)

    def clock(self) -> float:
        return self.now


def test_short_messages_take_the_low_latency_and_long_ones_the_low_load():
    gigabit = 8e-9
    link = Link({"doubling": (1e-4, 2 * gigabit), "ring": (5e-4, 1.5 * gigabit)})
    choice = link.calibrate()
    assert choice.algorithm_for(4 * KIB) == "doubling"
    assert choice.algorithm_for(MIB) == "ring"
    assert choice.algorithm_for(256 * MIB) == "ring"
    # they are as fast at 4e-4 s / (0.5 * 8e-9 s) = 100 kB; decided at powers of two
    assert [choice.algorithm for choice in choice.bins] == ["doubling", "ring"]
    assert 64 * KIB < choice.bins[0].up_to_bytes < 256 * KIB


@pytest.mark.parametrize("bits_per_s", [100e6, 1e9, 10e9])
def test_calibration_keeps_to_its_budget_on_slow_and_fast_links(bits_per_s):
    per_byte = 8 / bits_per_s
    loads = {"a": 1.0, "b": 1.5, "c": 1.5, "d": 2.0}
    link = Link({name: (2e-4, load * per_byte) for name, load in loads.items()})
    choice = link.calibrate()
    assert link.now <= all_reduce.BUDGET_S
    assert choice.took_s == pytest.approx(link.now)
    assert all(len(curve.bytes) >= 2 for curve in choice.curves.values())
    assert {curve.bytes[-1] for curve in choice.curves.values()} == {choice.curves["a"].bytes[-1]}


def test_even_a_link_too_slow_for_any_size_gives_a_choice():
    choice = Link({"a": (3.0, 0.0), "b": (2.0, 0.0)}).calibrate()
    assert choice.algorithm_for(100) == "b"


def test_other_ranks_take_what_rank_0_measured():
    told = []

    def tell(value):
        told.append(value)
        return value

    first = Link({"a": (1e-3, 0.0), "b": (2e-3, 0.0)})
    choice = calibrate(["a", "b"], first.run, tell, first.clock)
    answers = iter(copy.deepcopy(told))
    other = Link({"a": (9e-3, 0.0), "b": (1e-3, 0.0)})
    theirs = calibrate(["a", "b"], other.run, lambda _: next(answers), other.clock)
    assert theirs == choice
    assert other.calls == first.calls, "or ranks would wait for one another"


def test_curve_goes_straight_between_sizes_and_on_in_proportion():
    curve = Curve([1000, 2000], [1.0, 3.0])
    assert curve.at(10) == 1.0
    assert curve.at(1500) == 2.0
    assert curve.at(3000) == 4.5


def test_gain_that_may_be_noise_changes_nothing():
    curves = {"a": Curve([KIB, 512 * MIB], [1.0, 2.0]), "b": Curve([KIB, 512 * MIB], [1.01, 1.98])}
    assert decide(curves) == (Bin(None, "a"),)


def test_single_candidate_is_taken_without_a_measurement() -> None:
    def never(*_: object) -> None:
        raise AssertionError("nothing is to be found out")

    choice = calibrate(["ring"], never, never)
    assert choice == Choice((Bin(None, "ring"),), {}, 0.0)
