"""Results of searches as text: of strategies, of communication, and of batch sizes."""

from __future__ import annotations

import dataclasses
import math

import pytest
from tests.support.trials import changed
from tests.unit.analysis import ways
from tests.unit.analysis.fabricate import INTRAOP, MPI, SEQUENTIAL, make_trial_value

from paceline.analysis.statistics.intervals import Interval
from paceline.cli.findings import (
    communication_text,
    print_batch_findings,
    print_findings,
    settings_text,
)
from paceline.runner.tune.batch import BatchFinding, BatchProbe
from paceline.runner.tune.search import Findings, TargetResult
from paceline.runner.tune.spaces import LeftOut, SearchTarget

PIPELINE = dataclasses.replace(
    ways.PIPELINE, ranks=3, stages=3, micro_batches=6, schedule="gpipe", split_points=(4, 9)
)


NOTHING = dict.fromkeys(
    ("default", "default_samples_per_s", "fastest", "fastest_samples_per_s", "ratio")
)


def exactly(value):
    return Interval(estimate=value, low=value, high=value)


def finding(**changes):
    default, fastest = make_trial_value(SEQUENTIAL), make_trial_value(INTRAOP)
    values = {
        "target": SearchTarget(workload="tiny", name="intraop"),
        "default": default,
        "default_samples_per_s": exactly(20.0),
        "fastest": fastest,
        "fastest_samples_per_s": exactly(30.0),
        "ratio": Interval(estimate=1.5, low=1.25, high=1.75),
        "is_faster": True,
        "candidates": 2,
        "left_out": (),
        "failures": {},
        "cut_short": False,
    }
    return TargetResult(**{**values, **changes})


@pytest.fixture
def shown(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")

    def show(*findings, **settings):
        print_findings(Findings(found=findings, **settings))
        return capsys.readouterr().out

    return show


def test_default_and_best_have_a_row_each_with_the_ratio(shown):
    text = shown(finding())
    (default,) = [line.split() for line in text.splitlines() if " default " in line]
    (best,) = [line.split() for line in text.splitlines() if " best " in line]
    assert default == ["intraop", "*", "default", "t1", "20"]
    assert best == ["best", "t2", "30", "1.50", "(1.25\N{EN DASH}1.75)"]


def test_strategy_that_may_be_as_fast_as_the_best_is_marked(shown):
    slower = finding(
        target=SearchTarget(workload="tiny", name="threads"),
        fastest_samples_per_s=exactly(29.0),
        near_best=True,
    )
    text = shown(finding(), slower)
    assert "intraop *" in text
    assert "threads ?" in text
    assert "? undecided: perhaps as fast (5 %)" in text


@pytest.mark.parametrize(
    ("low", "high", "bounds"),
    [
        (0.9, 1.3, "0.90\N{EN DASH}1.30"),
        (0.35, 2.34, "0.35\N{EN DASH}2.34"),
        (0.0, math.inf, "not known"),
    ],
)
def test_default_is_kept_where_another_was_not_shown_to_be_faster(shown, low, high, bounds):
    text = shown(finding(ratio=Interval(estimate=1.1, low=low, high=high), is_faster=False))
    assert f"1.10 ({bounds}) no gain" in text
    assert "the default (5 %), which is kept" in text


def test_strategy_without_any_measurement_says_why(shown):
    text = shown(
        finding(
            **NOTHING,
            left_out=(LeftOut(what="default", reason="wants 4 cores, this node has 2"),),
            failures={"x": "out of memory\nand a long log"},
        )
    )
    assert "nothing measured" in text
    assert "left out: default: wants 4 cores" in text
    assert "failed: out of memory\n" in text
    assert "long log" not in text


def test_many_candidates_that_were_left_out_are_one_line_with_their_number(shown):
    left_out = [LeftOut(what=f"stages {n}", reason=f"needs {n} cores") for n in range(3, 20)]
    left_out.append(LeftOut(what="40 others", reason="max_candidates = 8", count=40))
    text = shown(finding(left_out=tuple(left_out)))
    assert text.count("left out") == 1
    assert "57 candidates left out, for example stages 3: needs 3 cores" in " ".join(text.split())


def test_settings_of_a_pipeline_tell_stages_micro_batches_schedule_and_cut():
    trial = make_trial_value(PIPELINE)
    assert settings_text(trial) == "s3 t1 m6 gpipe split at 4, 9"


def default_trial():
    return make_trial_value(MPI)


def best_trial(**changes):
    found = {"bucket_mb": 5.0, "buckets_in_flight": 2, "parameters": {"btl_tcp_links": "2"}}
    return changed(default_trial(), **{**found, **changes})


def of_communication(**changes):
    values = {
        "target": SearchTarget(workload="tiny", name="trials[2]"),
        "default": default_trial(),
        "fastest": best_trial(),
        "candidates": 9,
        "repeats": (4, 5),
    }
    return finding(**{**values, **changes})


@pytest.fixture
def shown_communication(shown):
    def show(*findings):
        text = shown(*findings, compares_targets=False)
        assert max(map(len, text.splitlines())) <= 80
        return text

    return show


def test_default_and_best_are_set_against_each_other(shown_communication):
    text = shown_communication(of_communication())
    assert "1.50 (1.25\N{EN DASH}1.75)" in text
    assert "5 MB buckets, 2 in flight" in text


def test_winner_that_turned_out_slower_is_no_gain(shown_communication):
    slower = Interval(estimate=0.9, low=0.8, high=0.95)
    text = shown_communication(of_communication(ratio=slower, is_faster=False))
    assert "0.90 (0.80\N{EN DASH}0.95) no gain" in " ".join(text.split())
    assert "which is kept" in text


def test_default_that_is_the_fastest_is_said_to_be(shown_communication):
    text = shown_communication(of_communication(fastest=default_trial(), ratio=None))
    assert "the default is the fastest of 9 candidates" in text
    assert not any(line.split()[:1] == ["best"] for line in text.splitlines())


def test_lossy_winner_is_no_longer_the_same_training(shown_communication):
    lossy = best_trial(compression={"method": "bf16"})
    text = shown_communication(of_communication(fastest=lossy))
    assert "is lossy: it does not train the same" in text
    assert "is lossy: it does not train the same" not in shown_communication(of_communication())


def test_trials_that_were_left_alone_are_named_with_the_reason(shown_communication):
    alone = of_communication(
        target=SearchTarget(workload="tiny", name="trials[3]"),
        **NOTHING,
        candidates=0,
        left_out=(LeftOut(what="all", reason="ranks share memory, " + "really " * 12),),
    )
    text = shown_communication(of_communication(), alone)
    assert "trials[3]: left out: all: ranks share memory" in text


def test_communication_tells_all_that_a_search_may_change():
    assert communication_text(default_trial()) == "25 MB buckets, auto"
    found = best_trial(algorithm="ring", compression={"method": "int8"})
    assert communication_text(found) == "5 MB buckets, 2 in flight, ring, int8, btl_tcp_links=2"


@pytest.mark.parametrize("reduction", ["hierarchical", "zero-1"])
def test_nodes_that_reduce_in_their_memory_first_have_no_buckets(reduction):
    trial = changed(default_trial(), reduction=reduction)
    assert communication_text(trial) == "auto"


@pytest.mark.parametrize("strategy", ["sharded", "parameter-server"])
def test_strategies_that_send_no_buckets_have_none(strategy):
    trial = changed(default_trial(), local_strategy=strategy)
    assert communication_text(trial) == "auto"


def test_table_shows_memory_speed_and_what_does_not_fit(capsys):
    found = BatchFinding(
        workload="tiny",
        configuration="tiny.local.none.sequential.n1r1t1.fp32",
        largest_batch=188,
        limited_by="memory",
        probes=[
            BatchProbe(global_batch=188, private_bytes=[2258 * 2**20], samples_per_s=25.1),
            BatchProbe(global_batch=222, fits=False, reason="too much"),
        ],
    )
    print_batch_findings([found])
    title, _, *rows = capsys.readouterr().out.splitlines()
    assert title == "tiny.local.none.sequential.n1r1t1.fp32: at most 188, limited by memory"
    assert rows[0].split() == ["188", "2258", "MiB", "25.1"]
    assert rows[1].split() == ["222", "does", "not", "fit"]
    assert max(map(len, rows)) <= 80
