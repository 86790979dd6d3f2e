"""Decisions over several runs: what wins where, what is tied, and what may not be compared."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from paceline.analysis.compare import compare_run
from paceline.analysis.recommend.decisions import Decision, Place, decisions, networks
from paceline.analysis.recommend.results import Results, read_results
from paceline.analysis.row import Row
from paceline.analysis.statistics import Interval
from paceline.analysis.verdict import Cause
from paceline.errors import DataError
from paceline.records.files import write_json

ERROR = 1.1  # factor between a median and its bounds


def around(median: float) -> Interval:
    return Interval(median=median, low=median / ERROR, high=median * ERROR)


def row(strategy: str, rate: float | None, **fields: Any) -> Row:
    """Return a row of `tiny` with a step of 8 samples."""
    values: dict[str, Any] = {
        "configuration": strategy, "workload": "tiny", "launcher": "local", "transport": "none",
        "local_strategy": strategy, "layout": "1x1", "labels": (), "details": (), "options": {},
        "nodes": 1, "ranks": 1, "ranks_per_node": 1, "threads_per_rank": 1,
        "threads_per_worker": 1, "replicas": 1, "replicas_per_node": 1, "stages": 1,
        "device": "cpu", "cores": 1, "precision": "fp32", "memory_format": "contiguous",
        "global_batch": 8, "repeats": 3, "is_baseline": strategy == "sequential",
        "samples_per_s": None if rate is None else around(rate),
        "step_s": None if rate is None else around(8 / rate), "equivalent": True,
        "phases_s": {}, "step_phases_s": {}, "other_parts_s": {},
    }  # fmt: skip
    return Row(**values | fields)


def decide(*rows: Row, link: str | None = None) -> list[Decision]:
    return decisions([Results(source="run", origin="", rows=rows, link=link)])


def test_the_fastest_ties_and_the_next_are_apart() -> None:
    (found,) = decide(row("sequential", 100), row("processes", 200), row("threads", 190))
    assert found.best.configuration == "processes"
    assert [each.configuration for each in found.fastest] == ["processes", "threads"]
    assert found.next is not None
    assert found.next.configuration == "sequential"
    half = math.sqrt(2) * math.log(ERROR)  # both errors are independent
    assert found.lead is not None
    assert found.lead.median == pytest.approx(2)
    assert found.lead.low == pytest.approx(2 * math.exp(-half), rel=1e-4)
    assert found.lead.high == pytest.approx(2 * math.exp(half), rel=1e-4)


def test_only_equivalent_rows_are_ranked_and_measured_ones_are_named() -> None:
    rows = [
        row("sequential", 100),
        row("intraop", 150),
        row("threads", 300, equivalent=False),
        row("pipeline", None, failed="out of memory"),
    ]
    (found,) = decide(*rows)
    assert [each.configuration for each in found.ranked] == ["intraop", "sequential"]
    assert [each.configuration for each in found.not_ranked] == ["threads"]


def test_one_configuration_is_no_decision() -> None:
    assert decide(row("sequential", 100), row("sequential", 50, precision="bf16")) == []


def test_more_nodes_are_compared_with_the_fastest_on_one() -> None:
    far = {"nodes": 2, "layout": "2x1x1"}
    rows = [row("sequential", 100), row("intraop", 150), row("processes", 75, **far)]
    (found,) = decide(*rows, link="1gbit")
    assert found.place == Place(2, "1gbit")
    assert found.more_nodes is not None
    assert found.more_nodes.median == pytest.approx(0.5)
    assert found.more_nodes.high < 1


def test_a_link_does_not_matter_on_one_node() -> None:
    (found,) = decide(row("sequential", 100), row("intraop", 150), link="1gbit")
    assert (found.place, found.more_nodes) == (Place(1, None), None)


def test_the_cause_explains_half_of_the_lead() -> None:
    fast = row("intraop", 200, step_phases_s={"forward": 0.01, "backward": 0.03, "bubble": None})
    # 40 ms more in a step: first 30 ms of them in one part, then 15 ms in each of two
    one = {"forward": 0.01, "backward": 0.03, "bubble": 0.03, "other": 0.01}
    (found,) = decide(fast, row("pipeline", 100, step_phases_s=one))
    assert found.cause == Cause(phase="bubble", faster_s=0, slower_s=0.03)
    two = {"forward": 0.025, "backward": 0.03, "bubble": 0.015}
    (spread,) = decide(fast, row("pipeline", 100, step_phases_s=two))
    assert spread.cause is None


def test_with_a_target_its_time_counts() -> None:
    target = {"target": "accuracy >= 0.8"}
    quick = row("sequential", 100, **target, time_to_target_s=around(30), steps_to_target=30.0)
    late = row("threads", 200, **target, time_to_target_s=around(60), steps_to_target=90.0)
    missed = row("hogwild", 300, **target, equivalent=None, is_lossy=True)
    (found,) = decide(late, missed, quick)
    assert [each.configuration for each in found.ranked] == ["sequential", "threads"]
    assert [each.configuration for each in found.not_ranked] == ["hogwild"]
    assert found.cause is None


def test_a_network_is_described_by_its_baseline() -> None:
    passes = {"forward": 0.01, "backward": 0.03}
    size = {"parameters": 250_000, "linear_parameters": 200_000}
    base = row("sequential", 100, step_phases_s=passes, **size)
    (found,) = networks(decide(base, row("intraop", 200, **size)))
    assert (found.workload, found.global_batch, found.gradient_bytes) == ("tiny", 8, 10**6)
    assert found.computation_s == pytest.approx(0.04)


def test_rows_of_a_run_and_of_its_json_are_equal(fabricate: ModuleType, tmp_path: Path) -> None:
    ways = [fabricate.SEQUENTIAL, fabricate.PIPELINE, fabricate.MPI]
    run = fabricate.make_run(tmp_path / "run", ways, repeats=2, jitter=0.02)
    document = compare_run(run).to_json()
    plain, nested, linked = (tmp_path / f"{n}.json" for n in ("plain", "nested", "linked"))
    write_json(plain, document)
    write_json(nested, {"date": "2026-11-22", "comparison": document | {"flags": ["busy"]}})
    write_json(linked, {"runs": [{"speed": "1gbit", "rows": document["rows"]}] * 2})
    (from_run,) = read_results(run.root)
    assert from_run.rows == compare_run(run).rows
    assert [each.rows for each in read_results(plain)] == [from_run.rows]
    (found,) = read_results(nested)
    assert (found.rows, found.origin) == (from_run.rows, "2026-11-22")
    assert (found.flags, from_run.flags) == (("busy",), compare_run(run).flags)
    assert [(each.link, each.rows) for each in read_results(linked)] == [
        ("1gbit", from_run.rows)
    ] * 2


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({}, "rows: Field required"),
        ({"rows": []}, "expected rows of `paceline compare --json`, found none"),
        ({"rows": [{"configuration": "a"}]}, "rows.0.workload: Field required"),
        ({"runs": ["a"]}, "expected the fields"),
    ],
)
def test_a_file_without_rows_is_named(
    tmp_path: Path, document: dict[str, Any], message: str
) -> None:
    file = tmp_path / "other.json"
    file.write_text(json.dumps(document))
    with pytest.raises(DataError, match=message) as error:
        list(read_results(file))
    assert str(file) in str(error.value)
