from __future__ import annotations

import pytest
from tests.support.trials import changed
from tests.unit.analysis.fabricate import MPI, make_trial_value

from paceline.analysis.statistics.intervals import Interval
from paceline.cli.findings import communication_text, print_findings
from paceline.tune.findings import Finding, Findings
from paceline.tune.spaces import LeftOut, Target

SUBJECT = Target(workload="tiny", name="trials[2]")


def default_trial():
    return make_trial_value(MPI)


def best_trial(**changes):
    found = {"bucket_mb": 5.0, "buckets_in_flight": 2, "parameters": {"btl_tcp_links": "2"}}
    return changed(default_trial(), **{**found, **changes})


def exactly(value):
    return Interval(median=value, low=value, high=value)


def finding(**changes):
    values = {
        "target": SUBJECT,
        "default": default_trial(),
        "default_samples_per_s": exactly(20.0),
        "fastest": best_trial(),
        "fastest_samples_per_s": exactly(30.0),
        "ratio": Interval(median=1.5, low=1.25, high=1.75),
        "candidates": 9,
        "left_out": (),
        "failures": {},
        "cut_short": False,
        "repeats": (4, 5),
    }
    return Finding(**{**values, **changes})


@pytest.fixture
def shown(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")

    def show(*findings):
        print_findings(Findings(found=findings, compares_targets=False))
        text = capsys.readouterr().out
        assert max(map(len, text.splitlines())) <= 80
        return text

    return show


def rows_of(text):
    return [line.split() for line in text.splitlines()]


def test_default_and_best_are_set_against_each_other(shown):
    text = shown(finding())
    assert "1.50 (1.25 to 1.75)" in text
    assert "5 MB buckets, 2 in flight" in text


def test_difference_within_the_noise_is_no_gain(shown):
    text = shown(finding(ratio=Interval(median=1.1, low=0.9, high=1.3)))
    assert "no gain" in text
    assert "so the default is kept" in text


def test_winner_that_turned_out_slower_is_called_so(shown):
    text = shown(finding(ratio=Interval(median=0.9, low=0.8, high=0.95)))
    assert "0.90 (0.80 to 0.95) slower" in " ".join(text.split())
    assert "so the default is kept" in text


def test_default_that_is_the_fastest_is_said_to_be(shown):
    text = shown(finding(fastest=default_trial(), ratio=None))
    assert "the default is the fastest of 9 candidates" in text
    assert not any(row[:1] == ["best"] for row in rows_of(text))


def test_lossy_winner_is_no_longer_the_same_training(shown):
    lossy = best_trial(compression={"method": "bf16"})
    assert "is lossy: it does not train the same" in shown(finding(fastest=lossy))
    assert "is lossy: it does not train the same" not in shown(finding())


def test_trials_that_were_left_alone_are_named_with_the_reason(shown):
    alone = finding(
        target=Target(workload="tiny", name="trials[3]"),
        default=None, default_samples_per_s=None, fastest=None, fastest_samples_per_s=None,
        ratio=None, candidates=0,
        left_out=(LeftOut(what="all", reason="ranks share memory, " + "really " * 12),),
    )  # fmt: skip
    assert "trials[3]: left out: all: ranks share memory" in shown(finding(), alone)


def test_communication_tells_all_that_a_search_may_change():
    assert communication_text(default_trial()) == "25 MB buckets, auto"
    found = best_trial(algorithm="ring", compression={"method": "int8"})
    assert communication_text(found) == "5 MB buckets, 2 in flight, ring, int8, btl_tcp_links=2"


def test_nodes_that_reduce_in_their_memory_first_have_no_buckets():
    trial = changed(default_trial(), reduction="hierarchical")
    assert communication_text(trial) == "auto"
