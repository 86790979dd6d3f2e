import pytest
from tests.support.trials import changed

from paceline.plan.spec.models import TuneSettings
from paceline.runner.tune.search import (
    Bracket,
    FinalBracket,
    Measurements,
    findings_of,
    interleaved,
    search,
)

SETTINGS = TuneSettings(repeats=4)


def nothing_follows(_contest):
    return None


def speeds_of(space, fastest, fast=50.0):
    """Return a speed of at most 30 for all candidates, and a higher one for `fastest`."""
    speeds = {t.configuration: 30.0 - i for i, t in enumerate(space.candidates)}
    return {**speeds, fastest.configuration: fast}


def found(space, measurer, *, settings=SETTINGS, follow=nothing_follows):
    measured = Measurements()
    brackets = [Bracket(space.target, space.candidates, settings)]
    finished = search(brackets, measurer, measured, follow, seed=1)
    (finding,) = findings_of([space], finished, measured).found
    return finding


def test_fastest_candidate_is_found_and_beats_the_default(make_space, measurer):
    space = make_space("pipeline")
    wanted = space.candidates[9]
    finding = found(space, measurer(speeds_of(space, wanted)))
    assert finding.fastest == wanted
    assert finding.chosen == wanted
    assert finding.ratio.estimate == pytest.approx(50 / 30, rel=1e-3)
    assert finding.is_faster
    assert finding.candidates == 16


def test_default_is_kept_where_the_difference_is_within_the_noise(make_space, measurer):
    space = make_space("pipeline")
    wanted = space.candidates[9]
    finding = found(space, measurer(speeds_of(space, wanted, fast=30.5), jitter=0.2))
    assert finding.fastest == wanted
    assert not finding.is_faster
    assert finding.ratio.estimate > 1
    assert finding.chosen == space.default


def test_survivors_are_measured_more_often_and_the_rest_once(make_space, measurer):
    space = make_space("pipeline")
    wanted = space.candidates[9]
    fake = measurer(speeds_of(space, wanted))
    found(space, fake)
    repeats = {t.configuration: 0 for t in space.candidates}
    for trial_id in fake.asked:
        repeats[trial_id.rpartition(".r")[0]] += 1
    assert repeats[wanted.configuration] == repeats[space.default.configuration] == 4
    assert min(repeats.values()) == 1
    assert len(fake.asked) == len(set(fake.asked)) == 16 + 8 + 2 * 4


def test_candidate_that_fails_is_named_and_asked_once(make_space, measurer):
    space = make_space("pipeline")
    speeds = speeds_of(space, space.candidates[9])
    broken = space.candidates[4].configuration
    del speeds[broken]
    fake = measurer(speeds)
    finding = found(space, fake)
    assert dict(finding.failures) == {broken: "it was made to fail"}
    assert [i for i in fake.asked if i.startswith(f"{broken}.r")] == [f"{broken}.r0"]
    assert finding.chosen == space.candidates[9]


def test_default_that_fails_loses_to_anything_that_works(make_space, measurer):
    space = make_space("pipeline")
    speeds = speeds_of(space, space.candidates[9])
    del speeds[space.default.configuration]
    finding = found(space, measurer(speeds))
    assert finding.default_samples_per_s is None
    assert finding.ratio is None
    assert finding.chosen == space.candidates[9]


def test_time_that_is_spent_ends_the_search_with_what_is_known(make_space, measurer):
    space = make_space("pipeline")
    speeds = speeds_of(space, space.candidates[9])
    late = found(space, measurer(speeds, trials_left=20))  # the first rung has 16 trials
    assert late.cut_short
    assert late.fastest == space.candidates[9]
    assert late.chosen == space.default  # two repeats may both have been disturbed
    early = found(space, measurer(speeds, trials_left=3))
    assert early.cut_short
    assert early.chosen is None


def test_only_candidate_is_measured_once(make_space, measurer):
    space = make_space("sequential")
    fake = measurer({space.default.configuration: 10.0})
    assert found(space, fake).chosen == space.default
    assert len(fake.asked) == 1


def test_winner_of_the_contest_that_follows_is_the_one_found(make_space, measurer):
    space = make_space("pipeline")
    first, beside = space.candidates[9], space.candidates[3]
    settings = pipeline_cut_at(beside, 4)
    speeds = {**speeds_of(space, first), settings.configuration: 80.0}

    def follow(bracket):
        if bracket.round_number == 1:
            return None
        assert bracket.best == first
        return Bracket(bracket.target, [bracket.best, settings], SETTINGS, round_number=1)

    finding = found(space, measurer(speeds), follow=follow)
    assert finding.chosen == settings
    assert finding.candidates == 17


def pipeline_cut_at(trial, cut):
    return changed(trial, balance=None, split_points=(cut,))


def test_best_strategy_is_the_fastest_of_those_chosen(make_space, measurer):
    spaces = [make_space(s) for s in ("sequential", "intraop", "threads", "processes")]
    speeds = dict(
        zip([s.default.configuration for s in spaces], [10.0, 17.0, 19.0, 18.0], strict=True)
    )
    measured = Measurements()
    brackets = [Bracket(s.target, s.candidates, SETTINGS) for s in spaces]
    finished = search(brackets, measurer(speeds), measured, nothing_follows, seed=1)
    findings = findings_of(spaces, finished, measured)
    assert findings.best("tiny").target.name == "threads"
    assert findings.best("tiny").chosen == spaces[2].default
    assert findings.best("simple-big") is None


@pytest.mark.parametrize(("speed", "near"), [(49.9, True), (30.0, False)])
def test_strategies_that_differ_by_less_than_the_noise_are_near(make_space, measurer, speed, near):
    spaces = [make_space(s) for s in ("sequential", "threads", "processes")]
    names = [s.default.configuration for s in spaces]
    fake = measurer(dict(zip(names, [10.0, 50.0, speed], strict=True)), jitter=0.01)
    finals = [FinalBracket(s.target, [s.default], SETTINGS) for s in spaces]
    measured = Measurements()
    finished = search(finals, fake, measured, nothing_follows, seed=1)
    findings = findings_of(spaces, finished, measured)
    assert [found.near_best for found in findings.found] == [False, False, near]
    assert {name.rpartition(".r")[2] for name in fake.asked} == {"4", "5", "6", "7"}


def test_trials_of_all_strategies_are_interleaved_after_the_baseline(make_space):
    spaces = [make_space(s) for s in ("pipeline", "sequential", "processes")]
    trials = [t for s in spaces for t in s.candidates]
    order = interleaved(trials, seed=1)
    assert order[0].is_baseline
    assert sorted(t.id for t in order) == sorted(t.id for t in trials)
    assert [t.id for t in order] == [t.id for t in interleaved(trials, seed=1)]
    assert [t.id for t in order] != [t.id for t in interleaved(trials, seed=2)]
