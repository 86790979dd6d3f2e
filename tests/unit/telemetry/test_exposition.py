"""Measures as text for Prometheus: what changes is written anew, what ended is not told again."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from prometheus_client.parser import text_string_to_metric_families
from tests.unit.telemetry.full_tick import EXPECTED, HOST, TICK, WATCH, key

from paceline.telemetry.exposition import Exposition
from paceline.telemetry.measures import host_tick_values

if TYPE_CHECKING:
    from paceline.telemetry.ticks import HostTick


def values(exposition: Exposition, tick: HostTick) -> dict[str, float]:
    text = exposition.text_of(host_tick_values(HOST, tick, "1"))
    return {
        key(sample.name, sample.labels): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.name.endswith("_info")
    }


def test_second_writing_has_the_new_values_and_what_came_since() -> None:
    exposition = Exposition()
    (rank, *_) = WATCH.ranks
    other = dataclasses.replace(WATCH, run="other", ranks=(dataclasses.replace(rank, threads=9),))
    assert values(exposition, TICK) == EXPECTED
    both = values(exposition, dataclasses.replace(TICK, watches=(WATCH, other)))
    at = {"host": HOST, "run": "other", "rank": str(rank.rank)}
    assert both[key("paceline_rank_threads", at)] == 9
    assert both.keys() > EXPECTED.keys()
    assert values(exposition, TICK) == EXPECTED, "the other has ended"


def test_metric_is_told_once_with_all_its_series() -> None:
    text = Exposition().text_of(host_tick_values(HOST, TICK, "1"))
    told = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE ")]
    assert len(told) == len(set(told)) == len(list(text_string_to_metric_families(text)))
