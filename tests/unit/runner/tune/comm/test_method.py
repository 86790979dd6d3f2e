"""A whole search with made-up speeds: rounds, final, tuned spec, resuming."""

from __future__ import annotations

import json

import pytest
from tests.unit.runner.tune.comm.conftest import BASELINE, entry

from paceline.base.errors import EnvironmentLacks, NotComparable, UsageError
from paceline.plan.spec.loading import parse_spec
from paceline.runner.tune.local import tune_local
from paceline.runner.tune.spaces import SearchTarget

SECOND = SearchTarget(workload="simple-big", name="trials[2]")
TUNE = """[tune]
repeats = 2
buckets_mb = [5, 25]
buckets_in_flight = [2, "unbounded"]
bucket_waits_ms = []
algorithms = ["auto", "ring", "native"]
mpi_parameters = [{smsc = "^cma"}, {btl_sm_eager_limit = "32768"}]
"""


def spec(*entries, tune=TUNE):
    return "\n".join([BASELINE, *entries, tune])


def small_buckets_and_ring_are_fast(trial):
    """Each of the three is worth something, and they add up."""
    gains = (
        0.1 * (trial.option("bucket_mb") == 5),
        0.1 * (trial.option("algorithm") == "ring"),
        0.05 * (trial.option("parameters") == {"smsc": "^cma"}),
    )
    return 0.7 - sum(gains) + 0.05 * (trial.option("buckets_in_flight") is not None)


def repeats_of(ran, configuration):
    return [int(i.rpartition(".r")[2]) for i in ran if i.rpartition(".r")[0] == configuration]


def test_each_round_starts_from_the_winner_of_the_one_before(machine):
    machine.step_s = small_buckets_and_ring_are_fast
    found = machine.tune(spec(entry())).of(SECOND)
    assert found.chosen.option("bucket_mb") == 5
    assert found.chosen.option("algorithm") == "ring"
    assert found.chosen.option("parameters") == {"smsc": "^cma"}
    assert found.ratio.estimate == pytest.approx(0.7 / 0.45, rel=0.01)
    assert found.is_faster
    assert found.candidates == 4 + 2 + 2


def test_default_and_winner_are_measured_anew_in_the_end_and_only_that_decides(machine):
    machine.step_s = small_buckets_and_ring_are_fast
    found = machine.tune(spec(entry())).of(SECOND)
    assert found.repeats == (2, 3)
    last = machine.ran[-4:]
    assert {i.rpartition(".r")[0] for i in last} == {
        found.default.configuration,
        found.fastest.configuration,
    }
    for trial in (found.default, found.fastest):
        assert repeats_of(last, trial.configuration) == [2, 3]


def test_winner_that_is_no_faster_when_measured_anew_leaves_the_default(machine):
    def lucky_at_first(trial):
        if trial.option("bucket_mb") != 5:
            return 0.7
        return 0.4 if trial.repeat < 2 else 0.8

    machine.step_s = lucky_at_first
    found = machine.tune(spec(entry())).of(SECOND)
    assert found.fastest.option("bucket_mb") == 5
    assert found.ratio.estimate == pytest.approx(0.7 / 0.8, rel=0.01)
    assert found.chosen == found.default
    tuned = parse_spec((machine.folder / "found/tuned.toml").read_text(), "tuned.toml")
    assert tuned.trials[1].extension_keys.get("bucket_mb") is None


def test_strategies_and_the_baseline_are_measured_anew_in_the_end(machine):
    machine.step_s = lambda trial: 0.4 + 0.1 * trial.placement.ranks
    tune = "[tune]\nrepeats = 2\nmax_candidates = 2\noversubscribe = true\n"
    findings = machine.tune(spec(entry("local", "shared"), tune=tune), search=tune_local)
    assert [found.target.name for found in findings.found] == ["sequential", "processes"]
    baseline = findings.found[0].default.configuration
    assert repeats_of(machine.ran, baseline) == [0, 2, 3]
    for found in findings.found:
        assert found.repeats == (2, 3)
        assert repeats_of(machine.ran, found.chosen.configuration)[-2:] == [2, 3]


def test_tuned_spec_says_what_won_and_keeps_the_rest(machine):
    machine.step_s = small_buckets_and_ring_are_fast
    text = spec(entry(threads_per_rank=1), entry("local", "shared"))
    machine.tune(text)
    tuned = parse_spec((machine.folder / "found/tuned.toml").read_text(), "tuned.toml")
    asked = parse_spec(text, "mine.toml")
    assert tuned.tune is None
    assert tuned.trials[0] == asked.trials[0]
    assert tuned.trials[2] == asked.trials[2]
    assert tuned.trials[1].model_dump(exclude_unset=True) == {
        **asked.trials[1].model_dump(exclude_unset=True),
        "bucket_mb": 5.0,
        "algorithm": "ring",
        "mpi_parameters": {"smsc": "^cma"},
    }


def test_tuned_spec_says_a_compression_with_its_settings(machine):
    machine.step_s = lambda trial: 0.4 if trial.option("compression") else 0.7
    tune = (
        "[tune]\nrepeats = 3\nbuckets_mb = []\nbuckets_in_flight = []\nbucket_waits_ms = []\n"
        'compressions = ["powersgd"]'
    )
    machine.tune(spec(entry("torchrun", "gloo"), tune=tune))
    tuned = parse_spec((machine.folder / "found/tuned.toml").read_text(), "tuned.toml")
    assert (
        tuned.trials[1].extension_keys.get("compression"),
        tuned.trials[1].compression_rank,
    ) == ("powersgd", 4)


def test_trials_are_searched_each_on_its_own(machine):
    def step_s(trial):
        liked = 5 if trial.transport == "mpi" else 25
        return 0.5 if trial.option("bucket_mb") == liked else 0.7

    machine.step_s = step_s
    findings = machine.tune(spec(entry(), entry("torchrun", "gloo")))
    assert [found.target.name for found in findings.found] == ["trials[2]", "trials[3]"]
    assert [found.chosen.option("bucket_mb") for found in findings.found] == [5, 25]


def test_trial_that_sends_nothing_is_noted(machine):
    findings = machine.tune(spec(entry(), entry("local", "shared")))
    third = findings.of(SearchTarget(workload="simple-big", name="trials[3]"))
    assert (third.candidates, third.chosen) == (0, None)
    assert "memory" in third.left_out[0].reason


def test_tuning_json_holds_the_verdict(machine):
    machine.step_s = small_buckets_and_ring_are_fast
    found = machine.tune(spec(entry()))
    (told,) = json.loads((machine.folder / "found/tuning.json").read_text())["targets"]
    assert told["target"] == "trials[2]"
    assert told["chosen"] == found.of(SECOND).fastest.configuration
    assert told["is_faster"] is True


def test_tuning_json_holds_every_point_that_was_tried(machine):
    machine.step_s = small_buckets_and_ring_are_fast
    tune = TUNE.replace("bucket_waits_ms = []", "bucket_waits_ms = [2]")
    found = machine.tune(spec(entry(), tune=tune)).of(SECOND)
    (told,) = json.loads((machine.folder / "found/tuning.json").read_text())["targets"]
    points = {point["configuration"]: point for point in told["points"]}
    assert len(points) == told["candidates"] == 4 + 2 + 2 + 2
    assert points.keys() == {i.rpartition(".r")[0] for i in machine.ran if ".processes." in i}
    waits = {
        (point["options"]["bucket_mb"], point["options"].get("bucket_wait_ms"))
        for point in points.values()
    }
    assert {(5, 2), (25, 2)} <= waits
    chosen = points[found.chosen.configuration]
    assert list(chosen["samples_per_s"]) == ["0", "1", "2", "3"]
    assert chosen["samples_per_s"]["2"] == pytest.approx(
        found.chosen_samples_per_s.estimate, rel=0.02
    )
    assert chosen["failure"] is None


def test_search_that_was_killed_anywhere_goes_on_and_repeats_nothing(machine):
    machine.step_s = small_buckets_and_ring_are_fast
    text = spec(entry())
    interrupted = 0
    for _ in range(40):
        machine.runs_left = 3
        try:
            found = machine.tune(text, resume=interrupted > 0)
        except KeyboardInterrupt:
            interrupted += 1
        else:
            break
    assert interrupted > 3
    assert len(machine.ran) == len(set(machine.ran))
    assert found.of(SECOND).chosen.option("algorithm") == "ring"
    ran = list(machine.ran)
    assert machine.tune(text, resume=True) == found
    assert machine.ran == ran


def test_time_that_is_spent_ends_with_what_is_known(machine):
    with pytest.raises(NotComparable, match="--resume"):
        machine.tune(spec(entry()), budget_s=1e-9)


def test_spec_in_which_nothing_is_sent_is_refused_with_the_reasons(machine):
    with pytest.raises(UsageError, match=r"trials\[2\]: all: ranks of one node share its memory"):
        machine.tune(spec(entry("local", "shared"), tune="[tune]\n"))
    assert machine.ran == []


def test_parameter_that_this_mpi_does_not_know_is_refused_before_anything_runs(machine):
    with pytest.raises(EnvironmentLacks, match=r"tune\.mpi_parameters: no btl_tpc_links"):
        machine.tune(spec(entry(), tune='[tune]\nmpi_parameters = [{btl_tpc_links = "2"}]\n'))
    assert machine.ran == []
