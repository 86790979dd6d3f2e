"""Runs of one name on one host are told apart, for as long as they are watched."""

from __future__ import annotations

import hashlib
from dataclasses import replace

from paceline.telemetry.labels import RunLabels
from paceline.telemetry.watches import WatchRequest

FIRST = WatchRequest(
    id="0" * 16,
    boot_id="b",
    requested_unix_s=1.0,
    processes=[],
    run="r",
    interval_s=1.0,
    max_lifetime_s=60.0,
    trace="/one/r/trials/t/hosts/h/trace.jsonl",
    run_targets="/one/r/targets",
)
SECOND = replace(FIRST, id="1" * 16, run_targets="/two/r/targets")
SUFFIXED = f"r-{hashlib.sha256(b'/two/r').hexdigest()[:6]}"


def test_run_has_its_name_and_a_second_of_that_name_a_part_of_its_directorys_digest() -> None:
    labels = RunLabels({})
    assert labels.label_of(FIRST) == "r"
    assert labels.label_of(SECOND) == SUFFIXED
    assert labels.label_of(replace(SECOND, run="other", run_targets="/two/o/targets")) == "other"


def test_all_watches_of_a_run_have_its_label() -> None:
    labels = RunLabels({})
    labels.label_of(FIRST)
    labels.label_of(SECOND)
    assert labels.label_of(replace(FIRST, id="2" * 16, trace=None)) == "r"
    assert labels.label_of(replace(SECOND, id="3" * 16, trace=None)) == SUFFIXED


def test_label_holds_until_the_last_watch_of_its_run() -> None:
    labels = RunLabels({})
    labels.label_of(FIRST)
    labels.label_of(SECOND)
    labels.keep([SECOND])
    assert labels.label_of(SECOND) == SUFFIXED
    labels.keep([])
    assert labels.known == {}
    assert labels.label_of(SECOND) == "r"


def test_sampler_that_takes_over_goes_on_with_the_labels_of_the_one_that_died() -> None:
    before = RunLabels({})
    before.label_of(FIRST)
    before.label_of(SECOND)
    after = RunLabels(before.known)
    assert after.label_of(SECOND) == SUFFIXED  # whichever comes first now
    assert after.label_of(FIRST) == "r"


def test_traces_without_a_run_are_told_apart_by_their_folders() -> None:
    alone = replace(FIRST, run_targets=None, trace="/one/x/trace.jsonl")
    labels = RunLabels({})
    assert labels.label_of(alone) == "r"
    assert labels.label_of(replace(alone, trace="/two/x/trace.jsonl")) != "r"
