"""Sentences on local strategies on several nodes: order, launchers, traces and predictions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from statistics import median

from paceline.analysis.compare.from_one_node import (
    FromOneNode,
    PredictedChoice,
    PredictedSpeedup,
)
from paceline.analysis.compare.local_global import LocalGlobal, OrderChange, PlaceAnswer
from paceline.analysis.compare.places import LauncherGap
from paceline.analysis.compare.row import strategy_name
from paceline.analysis.compare.run import Comparison
from paceline.analysis.compare.traces import TraceRelation, TraceRelations
from paceline.analysis.statistics.intervals import Interval, Mean
from paceline.analysis.trial.reading import TIMES
from paceline.plan.spec.extensions import STRATEGIES
from paceline.show.report.wording import (
    DASH,
    MINUS,
    NOT_KNOWN,
    bounds,
    counted,
    listed,
    milliseconds,
    percent,
    place_words,
    with_bounds,
)

PART_WORDS = {
    "computation": "computation",
    "exchange": "exposed exchange",
    "waiting": "waiting for the slowest rank",
    "bubble": "pipeline bubbles",
    "rest": "the rest of a step",
}
TRACE_WORDS = {
    "cpu_percent": "CPU use",
    "ram_percent_mean": "memory in use",
    "threads_median": "the number of threads",
    "context_switches_per_s": "the rate of context switches",
    "iowait_percent": "IOWait",
    "sent_bytes_per_step": "bytes sent in a step",
}
_MOST_STRATEGIES = 50  # more are not a plan
_MOST_NAMED = 3


def answers(comparison: Comparison, found: LocalGlobal) -> list[str]:
    """Answer whether the local strategy matters on several nodes, and what goes along with it."""
    return [*order_sentences(comparison, found), *further_answers(comparison, found)]


def further_answers(comparison: Comparison, found: LocalGlobal) -> list[str]:
    """Compare Spark with MPI, say which traces go along with the global speedup, and how well it
    is predicted."""
    return [
        *_gap_sentences(comparison, found),
        *_trace_sentences(found),
        *_prediction_sentences(comparison, found.from_one_node),
    ]


def strategy_words(comparison: Comparison, configuration: str) -> str:
    return strategy_name(comparison.row(configuration), comparison.rows)


# --- the order of the strategies -----------------------------------------------------------------


def order_sentences(comparison: Comparison, found: LocalGlobal) -> list[str]:
    """Say for each number of nodes whether the strategy matters, and whether the order changes.

    Of several places with one number of nodes, that with most strategies counts.
    """
    words = []
    for _, same in groupby(found.answers, key=lambda answer: answer.place.nodes):
        answer = max(same, key=lambda answer: answer.strategies)
        words.append(f"{_matters(comparison, answer)} {_stays(comparison, found, answer)}")
    if found.changes:
        more = len(found.changes) - 1
        also = f" {counted(more, 'more pair')} of strategies changed places." if more else ""
        words.append(_change(comparison, found.changes[0]) + also)
    elif any(answer.same_fastest is not True for answer in found.answers):
        words.append("No pair of strategies is shown to change places.")
    return words


def _matters(comparison: Comparison, answer: PlaceAnswer) -> str:
    place = f"On {place_words(answer.place)}"
    if answer.matters is False:
        return f"{place} it does not: all {answer.strategies} strategies are equally fast."
    if answer.slowest_there is None or answer.over_slowest is None:
        return f"{place} this is not decided: no strategy is separated from the fastest."
    fastest, slowest = (
        strategy_words(comparison, name) for name in (answer.fastest_there, answer.slowest_there)
    )
    return f"{place} it does: {fastest} is {_times(answer.over_slowest)} as fast as {slowest}."


def _stays(comparison: Comparison, found: LocalGlobal, answer: PlaceAnswer) -> str:
    """Say whether the fastest on one node is the fastest there, with its speedups."""
    alone = strategy_words(comparison, answer.fastest_alone)
    there = strategy_words(comparison, answer.fastest_there)
    speedups = _speedups(found, answer)
    if answer.same_fastest is not None:
        stays = "stays" if answer.same_fastest else "does not stay"
        return f"The fastest strategy on one node, {alone}, {stays} the fastest: {speedups}."
    near_alone, near_there = (
        _not_separated(comparison, each)
        for each in (answer.not_separated_alone, answer.not_separated_there)
    )
    again = f"{there} again" if alone == there else there
    return (
        f"On one node {alone} had the highest speed{near_alone}; on {answer.place.nodes} it was "
        f"{again}{near_there}. {alone}: {speedups}."
    )


def _not_separated(comparison: Comparison, configurations: Sequence[str]) -> str:
    if not configurations:
        return ""
    names = [strategy_words(comparison, each) for each in configurations]
    return f" (not separated from {listed(names, _MOST_NAMED)})"


def _speedups(found: LocalGlobal, answer: PlaceAnswer) -> str:
    line = next(li for li in found.lines if li.configuration == answer.fastest_alone)
    there = line.at(answer.place)
    words = f"speedup {with_bounds(line.speedup)} on one node"
    if there is None:
        return words
    words += f", {with_bounds(there.speedup)} on {answer.place.nodes}"
    if there.efficiency is None:
        return words
    return f"{words}, efficiency between nodes {percent_with_bounds(there.efficiency)}"


def _change(comparison: Comparison, change: OrderChange) -> str:
    alone, there = (
        strategy_words(comparison, name) for name in (change.ahead_alone, change.ahead_there)
    )
    return (
        f"The order changes: on one node {alone} is {_times(change.alone)} as fast as {there}, but "
        f"on {place_words(change.place)} {there} is {_times(change.there)} as fast as {alone}"
        f"{_reason(comparison, change)}."
    )


def _reason(comparison: Comparison, change: OrderChange) -> str:
    """Name the part of a step in which the order changed, and what makes it longer."""
    if change.part is None or change.longer_s is None or change.shorter_s is None:
        return ""
    spent = f"{milliseconds(change.shorter_s)} instead of {milliseconds(change.longer_s)} a step"
    words = f", mainly in {PART_WORDS[change.part]}: {spent}"
    few, many = (
        comparison.row(name).placement.ranks_per_node
        for name in (change.ahead_there, change.ahead_alone)
    )
    if change.part == "exchange" and few < many:
        words += f" ({many} ranks of a node share its link, not {few})"
    return words


def _times(ratio: Interval) -> str:
    interval = bounds(ratio) if ratio.is_known else f"interval {NOT_KNOWN}"
    return f"{ratio.estimate:.2f}{TIMES} ({interval})"


def percent_with_bounds(value: Interval) -> str:
    return f"{100 * value.estimate:.0f} % ({percent_bounds(value)})"


def percent_bounds(value: Interval) -> str:
    if not value.is_known:
        return NOT_KNOWN
    return f"{100 * value.low:.0f}{DASH}{100 * value.high:.0f}"


# --- Spark against MPI ---------------------------------------------------------------------------


def gap_name(comparison: Comparison, found: LocalGlobal, gap: LauncherGap) -> str:
    """Name the strategy as on one node."""
    names = {each.configuration: li.configuration for li in found.lines for each in li.several}
    return strategy_words(comparison, names.get(gap.first, gap.first))


def _gap_sentences(comparison: Comparison, found: LocalGlobal) -> Iterator[str]:
    """State the largest difference between Spark and MPI, and its parts."""
    if not found.gaps:
        return
    gaps = found.gaps
    gap = max(gaps, key=lambda gap: abs(sum(part.difference_s.mean for part in gap.parts)))
    largest = f", largest of {len(gaps)} differences" if len(gaps) > 1 else ""
    words = (
        f"Spark against MPI over the same transport{largest} ({gap_name(comparison, found, gap)}, "
        f"{place_words(gap.place)}): the steps are {_times(gap.speed)} as fast"
    )
    if not gap.parts:
        yield f"{words}."
        return
    if comparison.dilation > 1:
        yield f"{words}; start, feeding and end are not measured in turns."
        return
    total_s = sum(part.difference_s.mean for part in gap.parts)
    parts = ", ".join(f"{part.part} {seconds_words(part.difference_s)}" for part in gap.parts)
    yield f"{words}; a trial takes {_signed(total_s)} s: {parts}."


def seconds_words(difference: Mean) -> str:
    """Format a difference in seconds, for example `+1.20 (+0.90 to +1.40)`."""
    interval = NOT_KNOWN
    if math.isfinite(difference.high - difference.low):
        interval = f"{_signed(difference.low)} to {_signed(difference.high)}"
    return f"{_signed(difference.mean)} ({interval})"


def _signed(seconds: float) -> str:
    return f"{seconds:+.2f}".replace("-", MINUS)


# --- traces --------------------------------------------------------------------------------------


def _trace_sentences(found: LocalGlobal) -> Iterator[str]:
    traces = found.traces
    if traces is None:
        return
    yield from _related(traces)
    if traces.strategies < traces.least_strategies:
        yield (
            f"With {traces.strategies} strategies the smallest two-sided p is "
            f"{traces.least_p_value:.2g}, so no trace can be shown to explain the global speedup. "
            f"{traces.least_strategies} strategies are needed at least{_proposal(found)}."
        )
    unclear = [TRACE_WORDS[trace] for trace in traces.not_varying]
    if unclear:
        verb = "do" if len(unclear) > 1 else "does"
        yield (
            f"Nothing is said of {listed(unclear)}, which {verb} not differ between strategies by "
            "more than between repeats."
        )
    if traces.not_measured:
        names = listed([TRACE_WORDS[trace] for trace in traces.not_measured])
        yield f"Not measured everywhere: {names}."


def _related(traces: TraceRelations) -> Iterator[str]:
    """Name the traces that are significant; without any, the one that is nearest to it."""
    scope = traces.scopes[0]
    tested = [each for each in scope.relations if each.beyond_local is not None]
    shown = [each for each in tested if each.is_significant]
    where = f"over {traces.strategies} strategies and {counted(scope.places, 'place')}"
    among = f"Holm over {counted(len(tested), 'trace')}"
    for each in shown:
        yield (
            f"Beyond the local speedup, {TRACE_WORDS[each.trace]} and global speedup go together: "
            f"{_correlation(each)} {where} ({among}). A correlation is no cause."
        )
    if shown or traces.strategies < traces.least_strategies:
        return
    if not tested:
        if any(each.correlation is not None for each in scope.relations):
            yield (
                "With the local speedup taken out, no order is left that a trace could go along "
                f"with ({where})."
            )
        return
    near = min(tested, key=lambda each: each.p_value or 0.0)
    needed = near.strategies_needed
    number = f"about {needed}" if needed and needed <= _MOST_STRATEGIES else "very many"
    more = f"; {number} strategies would show it" if needed else ""
    yield (
        f"No trace is shown to go along with the global speedup beyond the local speedup. The "
        f"nearest is {TRACE_WORDS[near.trace]}: {_correlation(near)} {where} ({among}){more}."
    )


def _correlation(relation: TraceRelation) -> str:
    value = f"{relation.beyond_local:.2f}".replace("-", MINUS)
    return f"partial rank correlation {value}, p = {relation.p_value:.2g}"


def _proposal(found: LocalGlobal) -> str:
    """Name local strategies that the run does not have."""
    used = {line.configuration.split(".")[3] for line in found.lines if line.several}
    missing = [name for name in STRATEGIES.names() if name not in used]
    return f"; add {listed(missing, _MOST_NAMED)}" if missing else ""


# --- predictions from one node -------------------------------------------------------------------


def _prediction_sentences(comparison: Comparison, found: FromOneNode) -> Iterator[str]:
    """State errors and choices for each number of nodes, and what is not predicted."""
    for nodes, same in groupby(found.speedups, key=lambda each: each.place.nodes):
        errors = {each: each.error for each in same if each.error is not None}
        if not errors:
            continue
        choices = [each for each in found.choices if each.place.nodes == nodes]
        chosen = "; ".join(
            _choice(comparison, each, names_place=len(choices) > 1) for each in choices
        )
        words = f"Predicted from one node, {_errors(comparison, errors)}."
        yield f"{words} Of these it would have chosen {chosen}." if chosen else words
    lacking: dict[str, list[PredictedSpeedup]] = {}
    for each in found.speedups:
        if each.reason is not None:
            lacking.setdefault(each.reason, []).append(each)
    for reason, missing in lacking.items():
        yield f"Not predicted from one node{_where(comparison, missing)}; {reason}."


def _where(comparison: Comparison, missing: Sequence[PredictedSpeedup]) -> str:
    """Name the speedups of one place, or count those of several."""
    places = dict.fromkeys(place_words(each.place) for each in missing)
    if len(places) > 1:
        return f": {counted(len(missing), 'speedup')} at {counted(len(places), 'place')}"
    names = [predicted_strategy(comparison, each) for each in missing]
    return f" for {next(iter(places))}: {listed(names, _MOST_NAMED)}"


def predicted_strategy(comparison: Comparison, speedup: PredictedSpeedup) -> str:
    """Name the strategy as on one node; one without a trial there by its kind."""
    if speedup.alone is None:
        return comparison.row(speedup.configuration).setup.local_strategy
    return strategy_words(comparison, speedup.alone)


def _errors(comparison: Comparison, errors: Mapping[PredictedSpeedup, Interval]) -> str:
    """Say how far predictions for one number of nodes are off, and name the worst of them."""
    off = {each: abs(error.estimate - 1) for each, error in errors.items()}
    worst = max(off, key=lambda each: off[each])
    low, middle, high = min(off.values()), median(off.values()), max(off.values())
    within = sum(each.is_within for each in errors)
    return (
        f"{counted(len(off), 'speedup')} of {counted(worst.place.nodes, 'node')}: "
        f"{percent(low)} to {percent(high)} off (median {percent(middle)}), {within} of them "
        f"within the predicted interval; most of all {predicted_strategy(comparison, worst)} on "
        f"{place_words(worst.place)}, predicted over measured {_times(errors[worst])}"
    )


def _choice(comparison: Comparison, choice: PredictedChoice, *, names_place: bool) -> str:
    """Name the strategy that is predicted to be the fastest, and the one that was."""
    chosen, fastest = (strategy_words(comparison, n) for n in (choice.chosen, choice.fastest))
    where = f" on {place_words(choice.place)}" if names_place else ""
    if choice.is_right is False and choice.ahead is not None:
        return f"{chosen}{where}, but {fastest} is {_times(choice.ahead)} as fast"
    if choice.is_right:
        return f"{chosen}{where}, as measured"
    near = [strategy_words(comparison, each) for each in (choice.fastest, *choice.not_separated)]
    others = listed([each for each in near if each != chosen], _MOST_NAMED)
    return f"{chosen}{where}, which is not separated from {others}"
