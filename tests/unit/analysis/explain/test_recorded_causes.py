"""Real disturbances of docs/results/causes.md: the present rules, applied to recorded means."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.unit.analysis.fabricate import make_trial_value
from tests.unit.analysis.ways import INTRAOP, MPI, SEQUENTIAL

from paceline.analysis.explain.explanation import name_causes
from paceline.analysis.explain.parts import CAUSE_PARTS, PART_NAMES, Measurement, Straggler
from paceline.analysis.explain.rules import Pair

RAW = Path(__file__).parents[4] / "docs" / "results" / "raw"
FILES = ("seeded_causes.json", "seeded_causes_links.json")
RECORDED = [
    case
    for name in FILES
    for case in json.loads((RAW / name).read_text())["raw"]
    if case.get("explanation", {}).get("significant")
]
WAYS = {"slow rank": MPI, "slow link": dataclasses.replace(MPI, nodes=2, ranks=1)}


def measurement(case: dict[str, Any], side: str) -> Measurement:
    found, name = case["explanation"], case["case"]
    way = WAYS.get(name, SEQUENTIAL)
    if name == "too many threads":
        threads = 2 if side == "faster" else 4 + 4 * case["round"]
        way = dataclasses.replace(INTRAOP, threads=threads, allocated_cores=2)
    parts_s = {part["part"]: part[f"{side}_s"] for part in found["parts"]}
    is_late = name == "slow rank" and side == "slower"  # its delay is what the others waited
    return Measurement(
        trial=make_trial_value(way),
        cores=int(found["time_on_cores"][1][side]),
        parts_s=np.array([parts_s[part] for part in PART_NAMES]),
        figures={row["name"]: row[side] for row in found["evidence"]} | {"host_cores": 2.0},
        straggler=Straggler(rank=1, host=None, phase=None) if is_late else None,
        delay_s=parts_s["comm_wait"] if is_late else 0.0,
    )


@pytest.mark.parametrize("case", RECORDED, ids=lambda case: f"{case['case']} {case['round']}")
def test_a_recorded_disturbance_is_the_only_cause_with_its_share(case: dict[str, Any]) -> None:
    pair = Pair(faster=measurement(case, "faster"), slower=measurement(case, "slower"))
    is_longer = {p["part"]: p["difference_s"]["low"] > 0 for p in case["explanation"]["parts"]}
    longer_s = {
        name: pair.part_s(name)
        for name, parts in CAUSE_PARTS.items()
        if pair.part_s(name) > 0 and any(is_longer[part] for part in parts)
    }
    whole_s = case["explanation"]["difference_s"]["mean"]
    (cause,), _ = name_causes(pair, [pair] * 3, longer_s, whole_s)
    assert cause.name in itertools.chain(*case["expected"].values())
    assert cause.share == pytest.approx(1.0, abs=0.15)
