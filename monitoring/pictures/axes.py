"""From where to where a panel's axis goes, and where its ticks stand."""

from __future__ import annotations

import math

from monitoring.pictures.units import is_binary

_TICKS = 5  # about
_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)
_TIME_TICKS = 5  # at most
_TIME_STEPS_S = (5, 10, 15, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600)
_ROOM = 0.08  # of the range, above and below what is drawn
_EDGE = 0.02  # of the range, where its end is given: a curve that runs along it is seen whole


def value_range(values: list[float], low: float | None, high: float | None) -> tuple[float, float]:
    """`low` and `high` where the panel says so; else as far as the values go, and some room."""
    least, most = (min(values), max(values)) if values else (0.0, 1.0)
    start = least if low is None else low
    end = most if high is None else high
    if end <= start:
        end = start + (abs(start) or 1.0)
        start = start if low is not None else start - (abs(start) or 1.0)
    room = (end - start) * _ROOM
    above = room if high is None else (end - start) * _EDGE
    return (start if low is not None else start - room, end + above)


def tick_values(start: float, end: float, unit: str, decimals: int | None = None) -> list[float]:
    """Round values from `start` to `end`: of 1, 2, 2.5 and 5, or of powers of two for bytes; none
    that so many decimals could not tell."""
    step = _step((end - start) / _TICKS, unit)
    if decimals is not None:
        step = max(1, math.ceil(step * 10**decimals - 1e-9)) / 10**decimals
    first, last = math.ceil(start / step - 1e-9), math.floor(end / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


def time_step_s(range_s: float) -> int:
    """How far a time axis' ticks are apart: few enough to stand beside one another."""
    return next((s for s in _TIME_STEPS_S if range_s / s <= _TIME_TICKS), _TIME_STEPS_S[-1])


def _step(about: float, unit: str) -> float:
    if is_binary(unit):
        # 512 MiB, 1 GiB, 2 GiB, ...; at least a byte
        return 2.0 ** max(0, math.ceil(math.log2(about)))
    if unit == "percentunit":
        about *= 100
    power = 10.0 ** math.floor(math.log10(about))
    step = next(s * power for s in _STEPS if s * power >= about * (1 - 1e-9))
    return step / 100 if unit == "percentunit" else step
