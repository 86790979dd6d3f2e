"""Effect of lossy training: what gradient compression or local updates saved, and their loss.

Such a trial is not equivalent to the baseline, and its final weights are not expected to be the
same. It is compared with the exact form of the same configuration instead: bytes, time, and the
mean loss of the last steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from paceline.analysis.compare.compute_row import reported_median
from paceline.analysis.compare.row import Row
from paceline.analysis.statistics.intervals import Interval
from paceline.analysis.trial.reading import exact_form
from paceline.analysis.trial.steps import FINAL_STEPS
from paceline.analysis.trial_analysis import TrialAnalysis
from paceline.plan.trials.trial import Trial

Trials = Mapping[str, Sequence[TrialAnalysis]]  # by configuration


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressionEffect:
    """One lossy configuration relative to a reference. None: it was not measured."""

    workload: str
    configuration: str
    reference: str | None  # the exact form of the configuration, else the baseline
    reference_is_exact_form: bool
    sent_bytes_per_step: float | None  # by rank 0, as it reports
    uncompressed_bytes_per_step: float | None  # the same without compression
    sent_share: float | None  # of the uncompressed bytes
    step_s: Interval | None
    reference_step_s: Interval | None
    speedup: Interval | None  # over the reference
    steps: int  # of the training
    last_steps: int  # over which the losses are means
    loss: float | None
    reference_loss: float | None
    loss_difference: float | None  # above 0: the loss is larger than that of the reference


def compression_effects(
    rows: Sequence[Row],
    trials: Trials,
    baseline: str | None,
    ratio: Callable[[str, str], Interval | None],
) -> tuple[CompressionEffect, ...]:
    """Describe every lossy configuration of one workload, in the order of `rows`.

    ratio: of the speeds of two configurations.
    """
    by_name = {row.configuration: row for row in rows if row.repeats}
    exact = [name for name in by_name if not by_name[name].equivalence.is_lossy]
    found = []
    for row in by_name.values():
        if not row.equivalence.is_lossy:
            continue
        own = trials[row.configuration]
        same = _exact_form(own[0].record.trial, exact, trials)
        reference = same or baseline
        other = None if reference is None else by_name[reference]
        sent = row.work.bytes_sent_per_step
        uncompressed = reported_median(own, "uncompressed_bytes_per_step")
        reference_loss = None if other is None else other.result.final_loss
        steps = min(len(t.steps.step) for t in own)
        found.append(
            CompressionEffect(
                workload=row.workload,
                configuration=row.configuration,
                reference=reference,
                reference_is_exact_form=same is not None,
                sent_bytes_per_step=sent,
                uncompressed_bytes_per_step=uncompressed,
                sent_share=sent / uncompressed if sent is not None and uncompressed else None,
                step_s=row.speed.step_s,
                reference_step_s=None if other is None else other.speed.step_s,
                speedup=None if reference is None else ratio(row.configuration, reference),
                steps=steps,
                last_steps=min(FINAL_STEPS, steps),
                loss=row.result.final_loss,
                reference_loss=reference_loss,
                loss_difference=None
                if row.result.final_loss is None or reference_loss is None
                else row.result.final_loss - reference_loss,
            )
        )
    return tuple(found)


def _exact_form(trial: Trial, exact: Sequence[str], trials: Trials) -> str | None:
    """Return the exact configuration that differs in nothing else, if there is one.

    Otherwise return one that differs only in how exact gradients are sent.
    """
    plain = exact_form(trial)
    if plain.configuration in exact:
        return plain.configuration
    return next((name for name in exact if _alike(plain, trials[name][0].record.trial)), None)


def _alike(one: Trial, other: Trial) -> bool:
    return all(
        getattr(one, name) == getattr(other, name)
        for name in ("launcher", "transport", "local_strategy", "placement", "training", "device")
    )
