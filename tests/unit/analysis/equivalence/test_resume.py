"""The judgement of `paceline verify --resume-with`, from fabricated records."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.analysis.equivalence.resume import judge_resume, position_of
from paceline.measure.records.own_steps import ResumedRank, ResumedStep, StateRecord

SAVED, STEPS = 3, 7


def state(at, **changes):
    """The state before step `at` of the uninterrupted training."""
    usual = {
        "weights": {"w": (4.0, 1.0 + at), "v": (4.0, 2.0 + at)},
        "gradient": {"w": (4.0, 5.0 + at), "v": (4.0, 1e-9)},
        "moments": {"w.exp_avg": (4.0, float(at))},
        "copies": {"Net#0.w": (4.0, 7.0 + at)},
        "buffers": {"mean": (4.0, 8.0 + at)},
    }
    return StateRecord(**{**usual, **changes})


def step(at, number=None, **changes):
    """Step `at` of the uninterrupted training, as step `number` of its process."""
    usual = {
        "step": at if number is None else number,
        "optimizer": 0,
        "samples": [f"{at}a", f"{at}b"],
        "losses": [1.0 / (1 + at)],
        "values": {"group0.lr": 0.1 / (1 + at), "group0.momentum": 0.9},
        "scaler": {"scaler.scale": 2.0 ** (at + 3)},
        "generators": {"torch": f"t{at}", "python": "p"},
        "total": (8.0, 3.0 + 2 * at),
        "state": state(at),
    }
    return ResumedStep(**{**usual, **changes})


def whole():
    return ResumedRank(steps=[step(at) for at in range(STEPS)])


def stopped():
    return ResumedRank(
        steps=[step(at, state=StateRecord()) for at in range(SAVED)],
        saved_after=[SAVED],
        was_stopped=True,
    )


def continued(changed=lambda at: {}, saved=SAVED):
    steps = [step(at, at - saved, **changed(at)) for at in range(saved, STEPS)]
    return ResumedRank(steps=steps)


def finding(changed=lambda at: {}, ranks=1):
    return judge_resume([stopped()] * ranks, [continued(changed)] * ranks, [whole()] * ranks)


def only_first(**changes):
    return lambda at: changes if at == SAVED else {}


def test_an_equal_training():
    found = finding()
    assert (found.passed, found.step, found.steps) == (True, None, STEPS - SAVED)
    assert found.reasons == ("4 steps after step 3 agree",)


WRONG = {
    "samples repeated: step 4 trains on those of step 1": lambda at: {
        "samples": [f"{at - SAVED}a", f"{at - SAVED}b"]
    },
    "samples skipped: step 4 trains on those of step 5, 1 step too late": lambda at: {
        "samples": [f"{at + 1}a", f"{at + 1}b"]
    },
    "samples in another order: ": only_first(samples=["0a", "5b"]),
    "samples in another order from step 4": only_first(samples=["4a", "5b"]),
    "step 4 has samples that the uninterrupted": only_first(samples=["x", "y"]),
    "schedule restarted: learning rate 0.1 instead of 0.025, as in step 1": lambda at: {
        "values": {"group0.lr": 0.1 / (1 + at - SAVED), "group0.momentum": 0.9}
    },
    "moments lost": only_first(state=state(SAVED, moments={})),
    "the state of the optimiser differs (w.exp_avg)": only_first(
        state=state(SAVED, moments={"w.exp_avg": (4.0, 1.0)})
    ),
    "the gradient scaler is new": only_first(scaler={"scaler.scale": 8.0}),
    "the gradient scaler differs (scaler.scale is 4 instead of 64)": only_first(
        scaler={"scaler.scale": 4.0}
    ),
    "the loss is scaled by 8": lambda at: {"losses": [8.0 / (1 + at)]},
    "generator not restored: torch": only_first(
        generators={"torch": "other", "python": "p"},
        state=state(SAVED, gradient={"w": (4.0, 9.0), "v": (4.0, 1e-9)}),
    ),
    "the gradient of w differs, with equal samples": only_first(
        state=state(SAVED, gradient={"w": (4.0, 9.0), "v": (4.0, 1e-9)})
    ),
    "the weights are older: those after step 1": only_first(
        state=state(SAVED, weights=state(1).weights), total=step(1).total
    ),
    "the weights are the initial ones": only_first(
        state=state(SAVED, weights=state(0).weights), total=step(0).total
    ),
    "the weights differ a little": only_first(
        state=state(SAVED, weights={"w": (4.0, 4.01), "v": (4.0, 5.01)}), total=(8.0, 9.02)
    ),
    "other weights than in the uninterrupted training: w": only_first(
        state=state(SAVED, weights={"w": (4.0, 9.0), "v": (4.0, 5.0)}), total=(8.0, 14.0)
    ),
    "a module that no optimiser trains differs": only_first(
        state=state(SAVED, copies={"Net#0.w": (4.0, 1.0)})
    ),
    "buffers were not restored: mean": only_first(state=state(SAVED, buffers={"mean": (4.0, 0.0)})),
}  # fmt: skip


@pytest.mark.parametrize("cause", WRONG)
@pytest.mark.parametrize("ranks", [1, 2])
def test_each_cause_is_named(cause, ranks):
    found = finding(WRONG[cause], ranks)
    assert (found.passed, found.step) == (False, SAVED)
    assert found.reasons[0].startswith(cause), found.reasons


def test_a_schedule_that_is_ahead():
    def ahead(at):
        values = {"group0.lr": 0.1 / (2 + at), "group0.momentum": 0.9}
        return {"values": values}

    short = ResumedRank(steps=continued(ahead).steps[:-1])
    for ours in (short, continued(ahead)):
        found = judge_resume([stopped()], [ours], [whole()])
        assert found.reasons[0].startswith("the schedule is 1 step ahead: learning rate 0.02 in")


def test_another_value_of_the_groups():
    found = finding(lambda at: {"values": {**step(at).values, "group0.momentum": 0.5}})
    assert found.reasons == ("value momentum 0.5 instead of 0.9",)


def test_all_findings_are_listed():
    found = finding(
        lambda at: {
            "samples": [f"{at - SAVED}a", f"{at - SAVED}b"],
            "scaler": {"scaler.scale": 8.0},
            "state": state(at, moments={}),
        }
    )
    assert [reason.split()[0] for reason in found.reasons] == ["moments", "the", "samples"]


def test_a_generator_without_an_effect_is_a_remark():
    found = finding(lambda _: {"generators": {"torch": "other", "python": "p"}})
    assert found.passed is True
    assert found.reasons[1] == (
        "the generator of torch was not restored; no compared step shows a difference"
    )


def test_a_generator_that_the_training_never_uses_is_not_mentioned():
    found = finding(lambda at: {"generators": {"torch": f"t{at}", "python": "other"}})
    assert found.reasons == ("4 steps after step 3 agree",)


def test_a_generator_of_another_rank_is_the_cause():
    other_state = state(SAVED, gradient={"w": (4.0, 9.0), "v": (4.0, 1e-9)})
    ours = [continued(only_first(state=other_state)) for _ in range(2)]
    ours[1].steps[0] = replace(ours[1].steps[0], generators={"torch": "other", "python": "p"})
    found = judge_resume([stopped()] * 2, ours, [whole()] * 2)
    assert found.reasons[0].startswith("generator not restored: torch of rank 1")


def test_a_gradient_of_rounding_only_is_not_compared():
    gradient = {"w": (4.0, 5.0 + SAVED), "v": (4.0, 5e-9)}
    assert finding(only_first(state=state(SAVED, gradient=gradient))).passed is True


def test_another_number_of_ranks_with_equal_steps():
    ours = [continued(lambda at, half=half: {"samples": [f"{at}{half}"]}) for half in "ab"]
    assert judge_resume([stopped()], ours, [whole()]).passed is True


def test_gradients_of_another_number_of_ranks_decide_nothing():
    def changed(at):
        gradient = {"w": (4.0, 5.0 + at + (0.5 if at == SAVED else 0)), "v": (4.0, 1e-9)}
        return {"samples": [f"{at}a"], "state": state(at, gradient=gradient)}

    ours = [continued(changed), continued(lambda at: {"samples": [f"{at}b"]})]
    found = judge_resume([stopped()], ours, [whole()])
    assert found.passed is None
    assert found.reasons[0].startswith("the gradient of w differs in step 4")


def test_another_number_of_ranks_with_another_batch():
    ours = [continued(), continued(lambda at: {"samples": [f"{at}x"]})]
    found = judge_resume([stopped()], ours, [whole()])
    assert found.passed is None
    assert "a step has 3 samples after the stop and 2 before it" in found.reasons[0]
    repeated = [continued(lambda _: {"samples": ["0a", "0b", "1a"]})] * 2
    found = judge_resume([stopped()], repeated, [whole()])
    assert (found.passed, found.reasons[0].split(":")[0]) == (False, "samples repeated")


def test_an_older_checkpoint_of_which_all_is_restored_is_a_remark():
    older = continued(saved=2)
    assert position_of([stopped()], [older]) == 2
    found = judge_resume([stopped()], [older], [whole()])
    assert (found.passed, found.saved_after) == (True, 2)
    assert found.reasons[1].startswith("it continues after step 2: 1 step of the stopped")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"samples": ["x"]}, "seed the script"),
        ({"values": {"group0.lr": 0.5}}, "--stop-with"),
        ({"total": (8.0, 99.0)}, "absolute path"),
    ],
)
def test_trainings_that_differ_before_the_stop_are_not_compared(changes, words):
    first = stopped()
    first.steps[1] = replace(first.steps[1], **changes)
    found = judge_resume([first], [continued()], [whole()])
    assert found.passed is None
    assert found.reasons[0].startswith("step 2, before the stop, differs")
    assert words in found.reasons[0]


def test_trainings_that_end_too_early_are_not_compared():
    short = ResumedRank(steps=whole().steps[:SAVED])
    assert "after the last step (3)" in judge_resume([stopped()], [continued()], [short]).reasons[0]
    none = judge_resume([stopped()], [ResumedRank()], [whole()])
    assert (none.passed, "no step of both" in none.reasons[0]) == (None, True)
    without = replace(stopped(), saved_after=None)
    assert judge_resume([without], [continued()], [whole()]).passed is None
