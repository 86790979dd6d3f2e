"""The backward passes of a step whose gradients its optimiser uses.

A script may empty a gradient between two passes. It has dropped what was there then, or it has
added it to a sum of its own, such as main gradients of 32 bits, with which the optimiser steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from paceline.analysis.equivalence.exchange import exchanged
from paceline.measure.records.own_steps import OwnStep, OwnSteps


def with_counted_passes(records: Sequence[OwnSteps]) -> list[OwnSteps]:
    """Return the ranks' records without the terms, rows and passes that no gradient counts."""
    by_key = [{(e.optimizer, e.step): e for e in each.steps} for each in records]
    shared = set(by_key[0]).intersection(*by_key[1:]) if by_key else set()
    whole = {
        key
        for key in shared
        if _uses_every_pass({rank: found[key] for rank, found in enumerate(by_key)})
    }
    return [
        replace(
            record,
            steps=[e if (e.optimizer, e.step) in whole else _current(e) for e in record.steps],
        )
        for record in records
    ]


def _uses_every_pass(steps: Mapping[int, OwnStep]) -> bool:
    """Return whether gradients that were emptied between passes are used with all of them."""
    emptied = {
        own.place
        for step in steps.values()
        for own in step.own
        if len(own.current) < len(own.passes)
    }
    found = exchanged(steps, len(steps)) if emptied else []
    means = [e for e in found if e.place in emptied and e.factor is not None and not e.is_zero]
    return bool(means) and all(each.of_every for each in means)


def _current(step: OwnStep) -> OwnStep:
    numbers = {each.number for own in step.own for each in own.current}
    if not numbers:  # ranks have gradients in parts
        return step
    return replace(
        step,
        terms=[each for each in step.terms if each.number in numbers],
        rows=[each for each in step.rows if each.number in numbers],
        passes=[each for each in step.passes if each.number in numbers],
    )
