"""The verdict on one recorded command: the parts of a step, the slow rank, the hosts."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.analysis.compare.row import COMPUTATION, Row
from paceline.analysis.compare.run import Comparison
from paceline.analysis.trial.communication import trial_communication
from paceline.analysis.trial_analysis import TrialAnalysis
from paceline.measure.records.phases import LABELS, STEP_PHASES
from paceline.show.report.profile import straggler_sentence
from paceline.show.report.section import Section
from paceline.show.report.wording import milliseconds, number, share

_LEAST_SHARE = 0.005  # of a step: a smaller phase is not named


def attached_section(comparison: Comparison) -> Section:
    """Return the verdict on the only trial of a run."""
    row = comparison.rows[0]
    [trial] = comparison.trials[row.configuration]
    sentences = [_steps(trial, row)]
    if row.speed.step_s is not None:
        sentences += [_main_cost(row), _phases(row), *_ranks(trial)]
    sentences += _hosts(row)
    return Section(sentences=sentences, notes=[f"! {flag}" for flag in comparison.flags])


def _steps(trial: TrialAnalysis, row: Row) -> str:
    done = len(trial.steps.step)
    ranks = "1 rank" if row.placement.ranks == 1 else f"{row.placement.ranks} ranks"
    joined = "" if row.placement.ranks == 1 else f", {row.setup.transport}"
    words = f"{done} steps on {ranks} ({row.setup.launcher}{joined})"
    if row.speed.step_s is None:
        warmup = trial.record.trial.training.warmup_steps
        return f"{words}: too few to measure, because the first {warmup} are the warm-up."
    rate = (
        "" if row.speed.samples_per_s is None else f", {number(row.speed.samples_per_s)} samples/s"
    )
    slow = (
        ""
        if row.speed.step_p95_s is None
        else f" (95 % within {milliseconds(row.speed.step_p95_s)})"
    )
    return f"{words}: {milliseconds(row.speed.step_s.estimate)} a step{slow}{rate}."


def _main_cost(row: Row) -> str:
    name = row.times.main_cost or COMPUTATION
    words = "waiting for data" if name == "data_wait" else LABELS.get(name, name)
    return f"Main cost: {words}, {share(row.times.main_cost_share)} of a step."


def _phases(row: Row) -> str:
    known = {
        name: s for name in STEP_PHASES if (s := row.times.step_phases_s.get(name)) is not None
    }
    whole = sum(known.values())
    parts = [
        f"{LABELS[n]} {share(s / whole)}" for n, s in known.items() if s > _LEAST_SHARE * whole
    ]
    return f"A step: {', '.join(parts)}."


def _ranks(trial: TrialAnalysis) -> Iterator[str]:
    if trial.record.trial.placement.ranks == 1:
        return
    found = trial_communication(trial.record)
    if found is None:
        yield "Its ranks exchanged nothing that was recorded."
        return
    yield from map(straggler_sentence, found.stragglers)


def _hosts(row: Row) -> Iterator[str]:
    if row.usage.cpu_percent is None:
        return
    words = f"Hosts: CPU {number(row.usage.cpu_percent)} % busy"
    if row.usage.iowait_percent is not None:
        words += f", {number(row.usage.iowait_percent)} % waiting for I/O"
    if row.usage.memory_peak_bytes is not None:
        words += f"; peak memory of the command {number(row.usage.memory_peak_bytes / 2**20)} MiB"
    yield f"{words}."
