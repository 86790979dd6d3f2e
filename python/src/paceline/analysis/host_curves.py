"""Counters of a trace as rates over time, and the cost of having taken the trace."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

from paceline.analysis.statistics import Interval, Series, ratio_interval, run_noise

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from paceline.analysis.comparison import TrialAnalysis

_LEAST_INTERVAL_S = 0.05  # of a rate: a watch's last sample may follow its last tick at once


class _Timed(Protocol):
    @property
    def unix_s(self) -> float: ...


_Sample = TypeVar("_Sample", bound=_Timed)


@dataclass(frozen=True, slots=True, kw_only=True)
class SidecarEffect:
    """Trials with the sidecar against the same trials without it.

    step_ratio: a step's time with it over that without, over so many pairs of repeats; an interval
    that holds 1 is no difference outside the noise.
    """

    configuration: str
    pairs: int
    step_ratio: Interval


def rates(
    samples: Sequence[_Sample],
    counter: Callable[[_Sample], float | None],
    *,
    seldom: bool = False,
) -> list[float | None]:
    """How fast a counter rose, per second, up to each sample since the one before that has it.

    None where there is none before it, or the counter ran backwards: it began anew. seldom: the
    counter is not read on every tick, and repeats its last value meanwhile; then the rate is from
    one change to the next.
    """
    found: list[float | None] = []
    before: tuple[float, float] | None = None
    for sample in samples:
        value = counter(sample)
        if value is None or (
            before is not None and _too_soon(sample.unix_s, value, before, seldom)
        ):
            found.append(None)
            continue
        rate = None
        if before is not None and value >= before[1]:
            rate = (value - before[1]) / (sample.unix_s - before[0])
        found.append(rate)
        before = (sample.unix_s, value)
    return found


def _too_soon(unix_s: float, value: float, before: tuple[float, float], seldom: bool) -> bool:
    return unix_s - before[0] < _LEAST_INTERVAL_S or (seldom and value == before[1])


def sidecar_effects(trials: Iterable[Sequence[TrialAnalysis]]) -> list[SidecarEffect]:
    """For each configuration of which some repeats went without the sidecar.

    The n-th repeat with it is held against the n-th without.
    """
    effects = []
    for repeats in trials:
        watched = _step_times(repeats, enabled=True)
        alone = _step_times(repeats, enabled=False)
        ratio = ratio_interval(watched, alone, run_noise([watched, alone]))
        if ratio is not None:
            effects.append(
                SidecarEffect(
                    configuration=repeats[0].record.trial.configuration,
                    pairs=min(len(watched), len(alone)),
                    step_ratio=ratio,
                )
            )
    return effects


def _step_times(repeats: Sequence[TrialAnalysis], *, enabled: bool) -> dict[int, Series]:
    chosen = [
        trial.step_s
        for trial in sorted(repeats, key=lambda t: t.repeat)
        if trial.record.trial.telemetry.enabled is enabled and trial.step_s is not None
    ]
    return dict(enumerate(chosen))
