from __future__ import annotations

import dataclasses

import pytest
from tests.unit.analysis import ways
from tests.unit.analysis.fabricate import INTRAOP, SEQUENTIAL, make_trial_value

from paceline.analysis.statistics.intervals import Interval
from paceline.cli.findings import print_findings, settings_text
from paceline.tune.findings import Finding, Findings
from paceline.tune.spaces import LeftOut, Target

PIPELINE = dataclasses.replace(
    ways.PIPELINE, ranks=3, stages=3, micro_batches=6, schedule="gpipe", split_points=(4, 9)
)


def exactly(value):
    return Interval(median=value, low=value, high=value)


def finding(**changes):
    default, fastest = make_trial_value(SEQUENTIAL), make_trial_value(INTRAOP)
    values = {
        "target": Target(workload="tiny", name="intraop"),
        "default": default,
        "default_samples_per_s": exactly(20.0),
        "fastest": fastest,
        "fastest_samples_per_s": exactly(30.0),
        "ratio": Interval(median=1.5, low=1.25, high=1.75),
        "candidates": 2,
        "left_out": (),
        "failures": {},
        "cut_short": False,
    }
    return Finding(**{**values, **changes})


@pytest.fixture
def shown(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")

    def show(*findings):
        print_findings(Findings(found=findings))
        return capsys.readouterr().out

    return show


def test_default_and_best_have_a_row_each_with_the_ratio(shown):
    text = shown(finding())
    (default,) = [line.split() for line in text.splitlines() if " default " in line]
    (best,) = [line.split() for line in text.splitlines() if " best " in line]
    assert default == ["intraop", "*", "default", "t1", "20"]
    assert best == ["best", "t2", "30", "1.50", "(1.25", "to", "1.75)"]


def test_strategy_that_may_be_as_fast_as_the_best_is_marked(shown):
    slower = finding(
        target=Target(workload="tiny", name="threads"),
        fastest_samples_per_s=exactly(29.0),
        ties_best=True,
    )
    text = shown(finding(), slower)
    assert "intraop *" in text
    assert "threads =" in text
    assert "= not separated from it: the difference may be chance" in text


def test_difference_without_significance_is_no_gain_and_explained(shown):
    text = shown(finding(ratio=Interval(median=1.1, low=0.9, high=1.3)))
    assert "1.10 (0.90 to 1.30) no gain" in text
    assert "the default is kept" in text


def test_strategy_without_any_measurement_says_why(shown):
    text = shown(
        finding(
            default=None,
            default_samples_per_s=None,
            fastest=None,
            fastest_samples_per_s=None,
            ratio=None,
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
