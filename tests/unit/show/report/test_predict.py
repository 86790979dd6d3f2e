"""Answers agree with their intervals; what is not predicted is said once for each reason."""

from __future__ import annotations

import pytest

from paceline.analysis.predict.prediction import Refusal
from paceline.analysis.statistics.intervals import Interval
from paceline.show.report.predict import judgement, refusal_sentences


def refusal(setup: str, nodes: tuple[int, ...], transport: str | None = None) -> Refusal:
    return Refusal(
        workload="tiny",
        setup=setup,
        transport=transport,
        nodes=nodes,
        reason="too few steps",
        measure="measure more steps",
    )


@pytest.mark.parametrize(
    ("low", "high", "words"),
    [
        (1.1, 1.9, "So they are faster."),
        (1.1, 3.5, "So they are faster."),
        (0.4, 0.7, "So they are slower."),
        (0.2, 0.9, "So they are slower."),
        (0.9, 1.2, "It is not clear whether they are faster."),
        (0.4, 3.0, "It is not clear whether they are faster."),
    ],
)
def test_answer_says_no_more_than_the_interval(low: float, high: float, words: str) -> None:
    assert judgement(Interval(estimate=(low * high) ** 0.5, low=low, high=high)) == words


def test_setups_with_one_reason_share_a_sentence() -> None:
    refusals = [
        refusal("threads", (2, 3, 4)),
        refusal("sequential", (8,), "gloo"),
        refusal("processes", (2, 3, 4)),
    ]
    assert refusal_sentences([refusal("threads", (1,))]) == [
        "threads, 1 node: too few steps. To predict: measure more steps."
    ]
    (named,) = refusal_sentences([refusal("threads", (1,))], names_workload=True)
    assert named.startswith("tiny: threads, 1 node: ")
    assert refusal_sentences(refusals) == [
        "threads and processes, 2 to 4 nodes: too few steps. To predict: measure more steps.",
        "sequential over gloo, 8 nodes: too few steps. To predict: measure more steps.",
    ]
