"""What is not predicted is said once for each reason."""

from __future__ import annotations

from paceline.analysis.predict.prediction import Refusal
from paceline.report.predict import refusal_sentences


def refusal(setup: str, nodes: tuple[int, ...], transport: str | None = None) -> Refusal:
    return Refusal(
        workload="tiny",
        setup=setup,
        transport=transport,
        nodes=nodes,
        reason="too few steps",
        measure="measure more steps",
    )


def test_setups_with_one_reason_share_a_sentence() -> None:
    refusals = [
        refusal("threads", (2, 3, 4)),
        refusal("sequential", (8,), "gloo"),
        refusal("processes", (2, 3, 4)),
    ]
    assert refusal_sentences([refusal("threads", (1,))]) == [
        "threads, 1 node: too few steps. To predict: measure more steps."
    ]
    assert refusal_sentences(refusals) == [
        "threads and processes, 2 to 4 nodes: too few steps. To predict: measure more steps.",
        "sequential over gloo, 8 nodes: too few steps. To predict: measure more steps.",
    ]
