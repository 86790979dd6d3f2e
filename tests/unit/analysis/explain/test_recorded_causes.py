"""Real disturbances of docs/results/raw: the present rules, applied to recorded means."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.unit.analysis.fabricate import make_trial_value
from tests.unit.analysis.ways import INTRAOP, MPI, SEQUENTIAL

from paceline.analysis.explain.evidence import CAUSE_PARTS, PART_NAMES, StepMeasurement, Straggler
from paceline.analysis.explain.explanation import name_causes
from paceline.analysis.explain.rules import Pair

RAW = Path(__file__).parents[4] / "docs" / "results" / "raw"
FILES = ("seeded_causes.json", "seeded_causes_links.json", "seeded_causes_pairs.json")
RECORDED = [
    case
    for name in FILES
    for case in json.loads((RAW / name).read_text())["raw"]
    if case.get("explanation", {}).get("significant")
]
TWO_HOSTS = dataclasses.replace(MPI, nodes=2, ranks=1)
WAYS = {"slow rank": MPI, "slow link": TWO_HOSTS, "slow link + competitors": TWO_HOSTS}


def measurement(case: dict[str, Any], side: str) -> StepMeasurement:
    found, name = case["explanation"], case["case"]
    way = WAYS.get(name, SEQUENTIAL)
    if name == "too many threads":
        threads = 2 if side == "faster" else 4 + 4 * case["round"]
        way = dataclasses.replace(INTRAOP, threads=threads, allocated_cores=2)
    parts_s = {part["part"]: part[f"{side}_s"] for part in found["parts"]}
    is_late = name == "slow rank" and side == "slower"  # its delay is what the others waited
    return StepMeasurement(
        trial=make_trial_value(way),
        cores=int(found["time_on_cores"][1][side]),
        parts_s=np.array([parts_s[part] for part in PART_NAMES]),
        figures={row["name"]: row[side] for row in found["evidence"]} | {"host_cores": 2.0},
        straggler=Straggler(rank=1, host=None, phase=None) if is_late else None,
        delay_s=parts_s["comm_wait"] if is_late else 0.0,
    )


@pytest.mark.parametrize("case", RECORDED, ids=lambda case: f"{case['case']} {case['round']}")
def test_the_larger_recorded_disturbance_is_the_main_cause(case: dict[str, Any]) -> None:
    """A single disturbance is the only cause. The bound of two is not far below their true share.

    Copying memory beside a competitor costs less than a tenth, so it need not be named.
    """
    pair = Pair(faster=measurement(case, "faster"), slower=measurement(case, "slower"))
    is_longer = {p["part"]: p["difference_s"]["low"] > 0 for p in case["explanation"]["parts"]}
    longer_s = {
        name: pair.part_s(name)
        for name, parts in CAUSE_PARTS.items()
        if pair.part_s(name) > 0 and any(is_longer[part] for part in parts)
    }
    whole_s = case["explanation"]["difference_s"]["mean"]
    causes, _ = name_causes(pair, [pair] * 3, longer_s, whole_s)
    true_shares = case["true_shares"]
    expected = case["expected"]
    assert len(causes) <= len(expected)
    assert causes[0].name in expected[max(true_shares, key=lambda name: true_shares[name])]
    for name, share in true_shares.items():
        found = sum(cause.share for cause in causes if cause.name in expected[name])
        assert found >= share - 0.15
