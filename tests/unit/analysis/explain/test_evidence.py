"""The text of a figure that is evidence for a cause."""

from __future__ import annotations

import pytest

from paceline.analysis.explain.evidence import amount


@pytest.mark.parametrize(
    ("value", "unit", "expected"),
    [
        (None, "%", "not measured"),
        (0.0, "%", "0 %"),
        (1.8e-12, "%", "0 %"),
        (-1.8e-12, "%", "0 %"),
        (0.00123, "%", "0.00123 %"),
        (12.345, "%", "12.3 %"),
        (12345.6, "1/s", "12346 1/s"),
        (1.2345e9, "bytes/s", "1234 MB/s"),
        (3.0, "bytes/s", "0 MB/s"),
        (0.0123, "s", "12.3 ms"),
        (2.5, "s", "2.5 s"),
        (4.0, "", "4"),
    ],
)
def test_figure_has_three_digits_and_no_exponent(
    value: float | None, unit: str, expected: str
) -> None:
    assert amount(value, unit) == expected
