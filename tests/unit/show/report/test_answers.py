"""Sentences on local strategies on several nodes, from made-up runs."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from tests.unit.analysis import fabricate
from tests.unit.analysis.fabricate import on_nodes
from tests.unit.analysis.ways import Way

from paceline.analysis.compare.run import Comparison, compare_run
from paceline.analysis.compare.traces import TraceRelation, TraceRelations, TraceScope
from paceline.show.report.answers import answers
from paceline.show.report.document import charts, page_sections, render
from paceline.show.report.local_global import QUESTION, answer_view
from paceline.show.report.table import comparison_text

LOCAL = (fabricate.SEQUENTIAL, fabricate.INTRAOP, fabricate.THREADS, fabricate.PROCESSES)


def _compared(root: Path, ways: list[Any], **run: Any) -> Comparison:
    return compare_run(fabricate.make_run(root, ways, **{"repeats": 2, "jitter": 0.002, **run}))


def _said(comparison: Comparison) -> list[str]:
    return [
        sentence for found in comparison.local_global for sentence in answers(comparison, found)
    ]


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    """Processes are fastest on one node, and slowest on two, where both ranks send."""
    ways: list[Any] = [*LOCAL, *(on_nodes(way, 2) for way in LOCAL[:3])]
    ways.append(on_nodes(fabricate.PROCESSES, 2, transfer_s=0.4))
    ways += [on_nodes(way, 2, launcher="spark", launch_s=9.0) for way in LOCAL[:2]]
    return _compared(tmp_path_factory.mktemp("changed"), ways)


def test_order_that_changes_is_said_with_its_reason(changed: Comparison) -> None:
    first, second, *_ = _said(changed)
    assert first.startswith("On 2 nodes (mpi over gloo) it does: intraop 1\u00d72 is 2.")
    assert " as fast as processes 2\u00d71. The fastest strategy on one node, processes" in first
    assert "does not stay the fastest: speedup 1.8" in first
    assert "efficiency between nodes 29 % (" in first
    assert second.startswith("The order changes: on one node processes 2\u00d71 is 1.8")
    assert "as fast as sequential, but on 2 nodes (mpi over gloo) sequential is 1." in second
    assert "mainly in exposed exchange: 50 ms instead of 40" in second
    assert "(2 ranks of a node share its link, not 1). 2 more pairs of strategies" in second


def _said_of_trace(changed: Comparison, **values: Any) -> str:
    """Return the sentence on traces where six strategies have one trace with these values."""
    relation = TraceRelation(
        trace="cpu_percent", correlation=0.8, is_significant=False,
        **{"beyond_local": None, "p_value": None, "strategies_needed": None, **values},
    )  # fmt: skip
    traces = TraceRelations(
        strategies=6, least_p_value=0.003, least_strategies=5, not_measured=(), not_varying=(),
        scopes=(TraceScope(nodes=None, places=1, relations=(relation,)),),
    )  # fmt: skip
    (found,) = changed.local_global
    said = answers(changed, dataclasses.replace(found, traces=traces))
    (sentence,) = (each for each in said if "trace" in each)
    return sentence


def test_order_that_the_local_speedup_explains_leaves_no_trace(changed: Comparison) -> None:
    assert _said_of_trace(changed) == (
        "With the local speedup taken out, no order is left that a trace could go along with "
        "(over 6 strategies and 1 place)."
    )


@pytest.mark.parametrize(("needed", "number"), [(12, "about 12"), (4022, "very many")])
def test_strategies_that_would_show_a_trace_are_counted(
    changed: Comparison, needed: int, number: str
) -> None:
    said = _said_of_trace(changed, beyond_local=0.4, p_value=0.3, strategies_needed=needed)
    assert said.endswith(f"p = 0.3 over 6 strategies and 1 place (Holm over 1 trace); {number} "
                         "strategies would show it.")  # fmt: skip


def test_spark_and_mpi_are_said_to_differ_in_start_feeding_and_steps(changed: Comparison) -> None:
    (sentence,) = (each for each in _said(changed) if each.startswith("Spark against MPI"))
    assert "largest of 2 differences (" in sentence
    assert "2 nodes (spark over gloo)): the steps are 1.00\u00d7 (" in sentence
    assert "a trial takes +8.5" in sentence
    assert "start +8.5" in sentence
    assert "feeding" in sentence


def test_four_strategies_are_said_to_be_too_few(changed: Comparison) -> None:
    (sentence,) = (each for each in _said(changed) if each.startswith("With 4 strategies"))
    assert "the smallest two-sided p is 0.083, so no trace can be shown" in sentence
    assert "5 strategies are needed at least; add " in sentence
    assert "sequential" not in sentence
    assert any("Not measured everywhere: the rate of context switches" in s for s in _said(changed))


def test_order_that_stays_is_said_to_stay(tmp_path: Path) -> None:
    ways = [*LOCAL[:3], *(on_nodes(way, 2) for way in LOCAL[:3])]
    first, *others = _said(_compared(tmp_path, ways))
    assert "The fastest strategy on one node, intraop 1\u00d72, stays the fastest:" in first
    assert not [each for each in others if "order" in each]


def test_undecided_order_is_said_to_be_undecided(tmp_path: Path) -> None:
    twin = dataclasses.replace(
        fabricate.PROCESSES, local_strategy="threads", transport="none", ranks=1, threads=2,
        thread_replicas=2,
    )  # fmt: skip
    ways = [fabricate.SEQUENTIAL, fabricate.PROCESSES, twin]
    ways += [on_nodes(way, 2, transfer_s=0.05) for way in (fabricate.PROCESSES, twin)]
    said = _said(_compared(tmp_path, ways, repeats=3, jitter=0.05))
    assert "this is not decided: no strategy is separated from the fastest." in said[0]
    assert (
        "On one node threads 2\u00d71 had the highest speed (not separated from processes 2\u00d71)"
        in said[0]
    )
    assert "); on 2 it was " in said[0]
    assert said[1] == "No pair of strategies is shown to change places."


def _predicted(root: Path, several: list[Any]) -> Comparison:
    """Draw a run in which three strategies have measured half of the batch on one node."""
    alone, case = LOCAL[:3], fabricate.Case(parameters=50_000)
    run = fabricate.make_run(root, [*alone, *several], cases=[case], repeats=3, jitter=0.01)
    fabricate.make_half_batch(run, alone, case, repeats=3, jitter=0.01)
    return compare_run(run)


def _on_two(way: Way, transfer_s: float = 0.013) -> Way:
    return on_nodes(way, 2, link="1gbit", transfer_s=transfer_s)


def test_predictions_from_one_node_are_said_with_their_errors(tmp_path: Path) -> None:
    comparison = _predicted(tmp_path, [*map(_on_two, LOCAL[:3])])
    found = _said(comparison)[-1]
    assert found.startswith("Predicted from one node, 3 speedups of 2 nodes: ")
    assert " % off (median " in found
    assert "; most of all " in found
    assert " on 2 nodes (mpi over gloo, link 1gbit), predicted over measured 1.0" in found
    assert found.endswith(" Of these it would have chosen intraop 1\u00d72, as measured.")
    assert "Predicted from one node, tiny" in render(comparison)


def test_wrong_choice_is_said_with_the_faster_strategy(tmp_path: Path) -> None:
    several = [_on_two(LOCAL[0]), _on_two(LOCAL[1], 0.2), _on_two(fabricate.PROCESSES)]
    *_, found, missing = _said(_predicted(tmp_path, [*several, _on_two(LOCAL[2])]))
    assert "it would have chosen intraop 1\u00d72, but threads 2\u00d71 is 1.7" in found
    assert found.endswith(" as fast.")
    assert missing == (
        "Not predicted from one node for 2 nodes (mpi over gloo, link 1gbit): processes; "
        "there is no trial on one node."
    )


def test_undecided_choice_is_said_to_be_undecided(tmp_path: Path) -> None:
    several = [_on_two(LOCAL[0]), _on_two(LOCAL[1]), _on_two(LOCAL[2], 0.0)]
    twin = dataclasses.replace(several[1], forward_s=several[1].forward_s)
    threads_s = several[2].step_s - twin.step_s
    several[1] = dataclasses.replace(twin, transfer_s=twin.transfer_s + threads_s)
    found = _said(_predicted(tmp_path, several))[-1]
    assert "it would have chosen intraop 1\u00d72, which is not separated from threads" in found


def test_speedups_without_what_they_need_have_no_number(changed: Comparison) -> None:
    [found] = [each for each in _said(changed) if "redicted from one node" in each]
    assert found == (
        "Not predicted from one node: 6 speedups at 2 places; the rate of the link was not "
        "recorded."
    )


def test_strategies_of_one_place_without_a_prediction_are_named(tmp_path: Path) -> None:
    ways = [*LOCAL, *(on_nodes(way, 2) for way in LOCAL)]
    [found] = [each for each in _said(_compared(tmp_path, ways)) if "redicted from one" in each]
    assert found == (
        "Not predicted from one node for 2 nodes (mpi over gloo): intraop 1\u00d72, threads "
        "2\u00d71, processes 2\u00d71 and 1 more; the rate of the link was not recorded."
    )


def test_terminal_has_the_answer_between_table_and_verdict(changed: Comparison) -> None:
    text = comparison_text(changed, 80)
    assert max(map(len, text.splitlines())) <= 80
    assert text.startswith(f"tiny: {QUESTION}")
    assert text.index("The order changes") < text.index("This run could show")


def test_page_begins_with_the_answer_and_its_figure(changed: Comparison) -> None:
    section = page_sections(changed)[0]
    assert (section.title, section.folded) == (QUESTION, False)
    page = render(changed)
    assert page.index(f"{QUESTION} On 2 nodes") < page.index("This run could show")
    figure = json.loads(charts(changed)["Local and global speedup, tiny"].json)
    names = {trace["name"]: trace["marker"] for trace in figure["data"]}
    assert set(names) == {"2 nodes (mpi over gloo)", "2 nodes (spark over gloo)"}
    assert len({marker["color"] for marker in names.values()}) == 1  # of the number of nodes
    assert len({marker["symbol"] for marker in names.values()}) == 2
    (line,) = figure["layout"]["shapes"]
    assert (line["x0"], line["x1"]) == (line["y0"], line["y1"])


def test_run_on_one_node_has_no_answer(tmp_path: Path) -> None:
    comparison = _compared(tmp_path, [*LOCAL[:2]])
    assert answer_view(comparison, "tiny") is None
    page = render(comparison)
    assert QUESTION not in page
    assert "redicted from one node" not in page
