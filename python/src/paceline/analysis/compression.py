"""What sending less saved, and what it did to the loss.

A trial that compresses gradients, or averages weights only now and then, is another training than
the baseline: nobody expects the same weights. So it is held against the same way of running with
nothing compressed: bytes, time, and the mean loss of the last steps.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paceline.analysis.statistics import Interval, interval_json
from paceline.analysis.steps import FINAL_STEPS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from paceline.analysis.row import Row
    from paceline.analysis.trial_analysis import TrialAnalysis
    from paceline.plan.trial import Trial

    Trials = Mapping[str, Sequence[TrialAnalysis]]  # by configuration


@dataclass(frozen=True, slots=True, kw_only=True)
class LessToSend:
    """One configuration against another that sends everything. None is what was not measured."""

    workload: str
    configuration: str
    against: str | None  # the same way with nothing compressed, else the baseline
    same_way: bool  # whether it is the former
    sent_bytes: float | None  # by rank 0 a step, as it says itself
    uncompressed_bytes: float | None  # of the same, had nothing been compressed
    step_s: Interval | None
    against_step_s: Interval | None
    speed_ratio: Interval | None  # times as fast as the other
    steps: int  # of the training
    last_steps: int  # the losses are means over so many
    loss: float | None
    against_loss: float | None

    @property
    def sent_share(self) -> float | None:
        """Of the uncompressed bytes."""
        if self.sent_bytes is None or not self.uncompressed_bytes:
            return None
        return self.sent_bytes / self.uncompressed_bytes

    @property
    def loss_difference(self) -> float | None:
        """Above 0 where sending less made the loss larger."""
        if self.loss is None or self.against_loss is None:
            return None
        return self.loss - self.against_loss

    def to_json(self) -> dict[str, Any]:
        return {
            "workload": self.workload,
            "configuration": self.configuration,
            "against": self.against,
            "same_way": self.same_way,
            "sent_bytes_per_step": self.sent_bytes,
            "uncompressed_bytes_per_step": self.uncompressed_bytes,
            "sent_share": self.sent_share,
            "step_s": interval_json(self.step_s),
            "against_step_s": interval_json(self.against_step_s),
            "speed_ratio": interval_json(self.speed_ratio),
            "steps": self.steps,
            "last_steps": self.last_steps,
            "loss": self.loss,
            "against_loss": self.against_loss,
            "loss_difference": self.loss_difference,
        }


def relate_less_to_send(
    rows: Sequence[Row],
    trials: Trials,
    baseline: str | None,
    ratio: Callable[[str, str], Interval | None],
) -> tuple[LessToSend, ...]:
    """Every configuration of one workload that is not exact, in the order of `rows`.

    ratio: of two configurations' speeds.
    """
    by_name = {row.configuration: row for row in rows}
    exact = [name for name in by_name if _first(trials, name).is_exact]
    found = []
    for row in rows:
        if row.configuration in exact:
            continue
        same = _same_way(row.configuration, exact, trials)
        against = same or baseline
        other = None if against is None else by_name[against]
        found.append(
            LessToSend(
                workload=row.workload,
                configuration=row.configuration,
                against=against,
                same_way=same is not None,
                sent_bytes=_said(trials[row.configuration], "sent_bytes_per_step"),
                uncompressed_bytes=_said(trials[row.configuration], "uncompressed_bytes_per_step"),
                step_s=row.step_s,
                against_step_s=None if other is None else other.step_s,
                speed_ratio=None if against is None else ratio(row.configuration, against),
                steps=_steps(trials[row.configuration]),
                last_steps=min(FINAL_STEPS, _steps(trials[row.configuration])),
                loss=row.final_loss,
                against_loss=None if other is None else other.final_loss,
            )
        )
    return tuple(found)


def _same_way(configuration: str, exact: Sequence[str], trials: Trials) -> str | None:
    """The exact configuration that differs in nothing else, as far as there is one; else one that
    differs only in how exact gradients travel."""
    trial = _first(trials, configuration)
    plain = trial.model_copy(update={"compression": None, "averaging": None})
    if plain.configuration in exact:
        return plain.configuration
    return next((name for name in exact if _alike(plain, _first(trials, name))), None)


def _alike(one: Trial, other: Trial) -> bool:
    return all(
        getattr(one, name) == getattr(other, name)
        for name in ("launcher", "transport", "local_strategy", "placement", "training", "device")
    )


def _first(trials: Trials, configuration: str) -> Trial:
    return trials[configuration][0].record.trial


def _said(trials: Sequence[TrialAnalysis], key: str) -> float | None:
    """The median over repeats of what the ranks said of their communication."""
    results = [t.record.result for t in trials]
    return _median(r.communication.get(key) for r in results if r is not None)


def _steps(trials: Sequence[TrialAnalysis]) -> int:
    return min(len(t.steps.step) for t in trials)


def _median(values: Iterable[Any]) -> float | None:
    known = [v for v in values if isinstance(v, int | float)]
    return statistics.median(known) if known else None
