"""Values and ticks as Grafana writes them."""

from __future__ import annotations

import pytest
from monitoring.pictures.axes import tick_values, time_step_s, value_range
from monitoring.pictures.units import text, tick_texts


@pytest.mark.parametrize(
    ("value", "unit", "expected"),
    [
        (0.4561, "percentunit", "45.6%"),
        (1, "percentunit", "100%"),
        (0.000857, "percentunit", "0.0857%"),
        (0, "bytes", "0 B"),
        (1023, "bytes", "1023 B"),
        (1024, "bytes", "1 KiB"),
        (1_503_238_553, "bytes", "1.40 GiB"),
        (15_130_000, "Bps", "15.1 MB/s"),
        (88.4, "Bps", "88.4 B/s"),
        (2.6e9, "hertz", "2.60 GHz"),
        (310, "watt", "310 W"),
        (0, "s", "0 s"),
        (0.0000421, "s", "42.1 µs"),
        (0.1043, "s", "104 ms"),
        (59.8, "s", "59.8 s"),
        (90, "s", "1.50 mins"),
        (7200, "s", "2 hours"),
        (67, "short", "67"),
        (31_000, "short", "31 K"),
        (31_040, "ops", "31.0K ops/s"),
        (1440, "count:/s", "1.44K /s"),
        (399.4, "suffix:images/s", "399 images/s"),
        (1.0481, "none", "1.05"),
        (61, "celsius", "61 °C"),
    ],
)
def test_value_has_three_digits_and_its_units_prefix(value, unit, expected) -> None:
    assert text(value, unit) == expected


def test_decimals_that_a_panel_asks_for_are_kept() -> None:
    assert text(399.42, "suffix:images/s", 1) == "399.4 images/s"
    assert text(0.5, "suffix:cores", 2) == "0.50 cores"
    assert text(0.4812, "s", 0) == "481 ms"


@pytest.mark.parametrize("unit", ["dthms", "suffix", "count:", ""])
def test_unknown_unit_is_refused(unit) -> None:
    with pytest.raises(ValueError, match="unit"):
        text(1.0, unit)


def test_what_is_no_number_is_said() -> None:
    assert text(float("inf"), "bytes") == "inf"


@pytest.mark.parametrize(
    ("start", "end", "unit", "expected"),
    [
        (0, 1.02, "percentunit", ["0%", "25%", "50%", "75%", "100%"]),
        (0, 2.2e9, "bytes", ["0 B", "512 MiB", "1 GiB", "1.5 GiB", "2 GiB"]),
        (0, 0.42, "s", ["0 s", "100 ms", "200 ms", "300 ms", "400 ms"]),
        (0.7, 1.6, "suffix:times", ["0.8 times", "1 times", "1.2 times", "1.4 times", "1.6 times"]),
    ],
)
def test_ticks_are_round_and_as_short_as_they_can_be(start, end, unit, expected) -> None:
    assert tick_texts(tick_values(start, end, unit), unit) == expected


def test_ticks_of_whole_numbers_are_whole() -> None:
    assert tick_values(0, 11.9, "short", decimals=0) == [0, 3, 6, 9]


def test_range_keeps_to_what_the_panel_says_and_leaves_room_elsewhere() -> None:
    assert value_range([0.2, 0.4], 0, 1) == pytest.approx((0, 1.02))
    low, high = value_range([2, 4], None, None)
    assert low < 2
    assert high > 4


@pytest.mark.parametrize("values", [[], [0.0, 0.0], [3.0]])
def test_range_of_values_that_do_not_differ_has_a_height(values) -> None:
    start, end = value_range(values, None, None)
    assert start < end
    assert all(start <= value <= end for value in values)


def test_times_have_so_few_ticks_that_they_can_be_read() -> None:
    assert time_step_s(98) == 30
    assert time_step_s(360) == 120
    assert time_step_s(1e6) == 21600
