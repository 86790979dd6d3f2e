"""The judgement of `paceline verify`: first difference and cause, from fabricated numbers."""

from __future__ import annotations

import dataclasses

import pytest

from paceline.analysis.equivalence.observed import judge
from paceline.measure.records.own_steps import (
    ComparedTensor,
    ModuleCall,
    Observed,
    TrainedRows,
    Update,
)

NAMES = ("hidden.weight", "head.weight")
SAMPLES = ["a", "b", "c", "d"]
ROUNDING = 2.0**-20


def tensor(name, factor=1.0, crc32=1, difference=None):
    apart = abs(factor - 1) if difference is None else difference
    return ComparedTensor(name=name, l2=1.0, difference_l2=apart, factor=factor, crc32=crc32)


def tensors(**changes):
    return [tensor(name, **changes) for name in NAMES]


def update(step=0, samples=(), gradient=None, change=None, weights=None, **more):
    return Update(
        step=step,
        optimizer=0,
        samples=list(samples) or None,
        losses=more.pop("losses", [1.0]),
        gradient=gradient or tensors(),
        change=change or tensors(),
        weights=weights or tensors(),
        **more,
    )


def call(name, samples, forward=1.0, backward=1.0, kind="Linear"):
    return ModuleCall(
        step=0,
        name=name,
        kind=kind,
        samples=list(samples),
        forward=[[forward, forward / 2] for _ in samples],
        backward=[[backward, backward / 2] for _ in samples],
    )


def calls(samples, *, scale=1.0, **changes):
    """Calls of two modules; changes: of one of them, by name."""
    return [
        call(name, samples, **{"backward": scale, **changes.get(name, {})})
        for name in ("hidden", "head")
    ]


def one_process(steps=2, modules=None, **more):
    return Observed(
        initial=tensors(),
        updates=[update(step, SAMPLES, **more) for step in range(steps)],
        calls=calls(SAMPLES, **(modules or {})),
    )


APART = tensors(factor=0.9, difference=0.9)
ROUNDED = Observed(
    initial=tensors(),
    updates=[
        update(
            step,
            SAMPLES,
            gradient=tensors(difference=ROUNDING),
            change=tensors(difference=ROUNDING),
        )
        for step in range(2)
    ],
    calls=calls(SAMPLES, hidden={"forward": 1 + ROUNDING}),
)


def ranks(*changes, scale=2.0, modules=None):
    """Two ranks with half of the samples each; changes: of their updates."""
    halves = (SAMPLES[:2], SAMPLES[2:])
    every = [{**dict(changes[0] if changes else {})}, {**dict(changes[-1] if changes else {})}]
    return [
        Observed(
            initial=tensors(),
            updates=[update(step, **{"samples": half, **change}) for step in range(2)],
            calls=calls(half, scale=scale, **(modules or {})),
        )
        for half, change in zip(halves, every, strict=True)
    ]


def found(ours, reference=None):
    return judge([reference or one_process()], [ROUNDED], ours)


def test_equal_steps_pass_with_their_number():
    result = found(ranks())
    assert (result.passed, result.steps) == (True, 2)
    assert result.largest < 1e-3


def test_optimisers_may_exchange_gradients_in_their_step():
    own = [{"gradient": tensors(factor=0.7, crc32=n, difference=0.9)} for n in (1, 2)]
    assert found(ranks(*own)).passed is True
    apart = [{**each, "change": APART} for each in own]
    assert found(ranks(*apart)).passed is False
    # A sum moves weights as the mean does, if the optimiser divides by the size of the gradient.
    multiples = [{"gradient": tensors(factor=2.0, crc32=n)} for n in (1, 2)]
    assert found(ranks(*multiples)).passed is False


def test_a_stage_that_multiplies_its_gradients_is_the_cause():
    stages = ranks()
    for stage, name, factor in zip(stages, NAMES, (1.2, 1.8), strict=True):
        for each in stage.updates:
            for kind in ("gradient", "change", "weights"):
                own = [e for e in getattr(each, kind) if e.name == name]
                object.__setattr__(each, kind, own)
            object.__setattr__(each, "gradient", [tensor(name, factor=factor)])
    result = found(stages)
    assert result.passed is False
    assert "by a norm of their own: 1.2 on rank 0, 1.8 on rank 1" in result.reason


def test_rounding_passes_up_to_four_times_the_measured_change():
    wide = dataclasses.replace(
        ROUNDED, updates=[update(0, SAMPLES, gradient=tensors(difference=2.0**-9))]
    )
    ours = ranks({"gradient": tensors(difference=2.0**-8)})
    reference = one_process(steps=1)
    assert judge([reference], [wide], ours).passed is True
    assert judge([reference], [ROUNDED], ours).passed is False
    assert judge([reference], [], ours).passed is False
    assert judge([reference], [], ranks()).passed is True


@pytest.mark.parametrize(
    ("ours", "reference", "words"),
    [
        (ranks({"gradient": tensors(factor=2.0)}), {}, "summed over 2 ranks instead of averaged"),
        (ranks({"gradient": tensors(factor=0.5)}), {}, "divided by 2 once too often"),
        (
            ranks({"gradient": tensors(factor=2.0)}, scale=4.0),
            {"losses": [1.0, 1.0]},
            "gradients of 2 accumulated passes were not divided",
        ),
        (ranks({"gradient": tensors(factor=3.0)}, scale=6.0), {}, "is 3.00 times as large"),
        (
            ranks(
                {"gradient": tensors(factor=0.7, crc32=2, difference=0.9), "change": APART},
                {"gradient": tensors(factor=1.3, difference=0.9), "change": APART},
            ),
            {},
            "was not exchanged",
        ),
        (
            ranks(
                {"gradient": tensors(factor=0.7, crc32=2)},
                {"gradient": tensors(factor=0.8)},
            ),
            {},
            "by numbers of their own, as by a norm of their own: 0.7 on rank 0, 0.8 on rank 1",
        ),
        (
            ranks({"gradient": [tensor(NAMES[0], 2.0), tensor(NAMES[1])]}),
            {},
            "that of hidden.weight was summed over 2 ranks",
        ),
        (
            ranks({"gradient": [tensor(NAMES[0], 0.9), tensor(NAMES[1], 1.2)], "clipped": True}),
            {},
            "clipped before they were reduced",
        ),
        (
            ranks(
                {"gradient": [tensor(NAMES[0], 0.9), tensor(NAMES[1], 1.2)]},
                modules={"hidden": {"forward": 1.5, "kind": "BatchNorm1d"}},
            ),
            {"modules": {"hidden": {"kind": "BatchNorm1d"}}},
            "hidden (BatchNorm1d) uses the statistics of each rank's samples",
        ),
        (
            ranks(
                {"gradient": [tensor(NAMES[0], 0.9), tensor(NAMES[1], 1.2)]},
                modules={"head": {"forward": 1.5}},
            ),
            {},
            "head (Linear) is the first module that computes another output",
        ),
        (
            ranks({"gradient": [tensor(NAMES[0], 0.9), tensor(NAMES[1], 1.2)]}),
            {},
            "all modules agree",
        ),
    ],
)  # fmt: skip
def test_a_gradient_that_differs_has_a_likely_cause(ours, reference, words):
    result = found(ours, one_process(**reference))
    assert result.passed is False
    assert result.step == 0
    assert result.tensor in NAMES
    assert words in result.reason


OTHER = {"gradient": [tensor(NAMES[0], 0.9), tensor(NAMES[1], 1.2)]}


def test_a_loss_that_differs_by_no_factor_is_no_matter_of_weights():
    def of_head(rank, numbers):
        found = ranks(OTHER)
        head = found[rank].calls[1]
        found[rank].calls[1] = dataclasses.replace(head, backward=[numbers] * 2)
        return found

    weights = found(of_head(1, [6.0, 3.0]))
    assert (weights.kind, weights.module) == ("gradient", "head")
    assert "samples have unequal weights on the ranks" in weights.reason
    targets = found(of_head(1, [2.0, 1.9]))
    assert (targets.kind, targets.module) == ("loss", "head")
    assert "samples have other targets" in targets.reason


def test_outputs_that_cannot_be_compared_row_by_row_prove_nothing():
    ours = ranks({**OTHER, "has_unknown_rows": True})
    assert (found(ours).passed, found(ours).kind) == (False, "module")
    for each in ours:
        each.calls = []
    assert found(ours).kind == "module"
    assert found(ranks(OTHER)).kind == "loss"  # all modules agree


def test_rows_whose_gradient_is_lost_between_modules_are_counted():
    ours = ranks(OTHER)
    hidden = ours[1].calls[0]
    ours[1].calls[0] = dataclasses.replace(hidden, backward=None)
    result = found(ours)
    assert (result.kind, result.module) == ("gradient", "hidden")
    assert "no gradient arrives at hidden for 2 of 4 samples" in result.reason


def test_gradients_that_are_multiplied_between_modules_are_found():
    result = found(ranks(OTHER, modules={"hidden": {"backward": 1.0}}))
    assert "gradients are multiplied by 0.50 on their way to hidden" in result.reason


def test_ranks_that_all_have_the_whole_batch_need_no_factor():
    whole = {"samples": SAMPLES, "gradient": tensors(factor=4.0)}
    stages = ranks(whole, scale=4.0)
    for each in stages:
        each.calls = calls(SAMPLES, scale=4.0)
    result = found(stages, one_process(losses=[1.0] * 4))
    assert "gradients of 4 accumulated passes were not divided" in result.reason


def test_a_stage_without_a_batch_knows_its_samples_by_their_places():
    stages = ranks({"samples": SAMPLES, **OTHER}, {"samples": (), **OTHER})
    stages[0].calls = calls(SAMPLES, scale=1.0)[:1]
    last = call("head", [f"#{place}" for place in range(4)], backward=1.0)
    stages[1].calls = [dataclasses.replace(last, forward=[[7.0, 1.0]] * 4)]
    assert "head (Linear) is the first module" in found(stages).reason


def test_an_update_that_is_lost_between_steps_is_found():
    lost = [dataclasses.replace(tensor(NAMES[0]), difference_l2=1.0)]
    ours = ranks()
    ours[1].updates[1] = dataclasses.replace(ours[1].updates[1], begin=lost)
    result = found(ours)
    assert (result.passed, result.kind, result.step) == (False, "update", 0)
    assert "on rank 1 it has another value when the next step begins" in result.reason
    moves = one_process()
    moves.updates[1] = dataclasses.replace(moves.updates[1], begin=lost)
    assert found(ours, moves).passed is True  # one process changes its weights between steps, too
    nearly = [dataclasses.replace(tensor(NAMES[0]), difference_l2=0.01)]
    ours[1].updates[1] = dataclasses.replace(ours[1].updates[1], begin=nearly)
    assert found(ours).passed is True


def numbers(rows, shift=0.0, factor=1.0):
    return [[factor * (row * row + 3 * n) + shift * n for n in range(8)] for row in rows]


@pytest.mark.parametrize(
    ("first", "second", "seed", "kind"),
    [
        (numbers([0, 2, 4, 6]), numbers([1, 3, 5, 7]), "a", "none"),
        (numbers([0, 2, 4, 6], shift=0.1), numbers([1, 3, 5, 7], shift=0.2), "a", "inputs"),
        (numbers([0, 1, 2, 3], factor=2), numbers([4, 5, 6, 7]), "a", "inputs"),
        (numbers([0, 2, 4, 6], shift=0.1), numbers([1, 3, 5, 7]), "b", "none"),  # at random
        (numbers([9, 1, 8, 6]), numbers([2, 3, 5, 7]), "a", "none"),  # other rows
        (numbers([0, 2, 4, 6], shift=1e-4), numbers([1, 3, 5, 7]), "a", "none"),  # rounded
    ],
)
def test_rows_that_each_rank_shifts_by_its_own_moments_are_found(first, second, seed, kind):
    reference = one_process(inputs=numbers(range(8)), generators={"torch": "a"})
    seeds = {"generators": {"torch": seed}}
    ours = ranks({"inputs": first, **seeds}, {"inputs": second, **seeds})
    assert found(ours, reference).kind == kind


def test_a_whole_weight_of_one_rank_is_named_beside_divided_ones():
    ours = ranks()
    for rank, each in enumerate(ours):
        each.initial = [tensor(NAMES[1], 1.0 + 0.1 * rank)]
        each.unknown = [NAMES[0]]
    result = found(ours)
    assert result.kind == "start-of-rank"
    assert "head.weight of rank 1 differs from that of rank 0 and of one process" in result.reason


def test_a_gradient_that_differs_is_judged_where_no_rank_has_a_whole_output():
    ours = ranks({"gradient": tensors(factor=2.0)})
    for each in ours:
        each.calls = []
    assert "summed over 2 ranks instead of averaged" in found(ours).reason


def test_other_labels_of_the_rows_of_one_process_are_named():
    wrong = {"gradient": tensors(factor=0.8)}
    ours = ranks({"samples": ["a", "B"], **wrong}, {"samples": ["c", "D"], **wrong})
    rows = [TrainedRows.of([list(step)] * 2, is_whole=True) for step in ("1234", "12", "34")]
    result = judge([one_process()], [ROUNDED], ours, (rows[:1], rows[1:]))
    assert (result.passed, result.kind) == (False, "labels")
    assert "other labels or weights" in result.reason
    drawn = [
        dataclasses.replace(u, generators={"torch": "1"}) for each in ours for u in each.updates[:1]
    ]
    others = [Observed(initial=tensors(), updates=[each]) for each in drawn]
    assert judge([one_process()], [ROUNDED], others, (rows[:1], rows[1:])).kind == "samples"


def test_a_module_that_gets_all_rows_on_each_rank_must_compute_the_same():
    wrong = {"gradient": tensors(factor=0.8, difference=0.5), "samples": SAMPLES}
    ours = ranks(wrong, modules={"hidden": {"forward": 1.5}})
    for each in ours:
        each.calls = calls(SAMPLES, hidden={"forward": 1.5})
    result = found(ours)
    assert (result.passed, result.kind) == (False, "gradient")
    assert "hidden (Linear) is the first module" in result.reason
    halves = ranks({"gradient": tensors(factor=0.8)}, modules={"hidden": {"forward": 1.5}})
    assert found(halves).kind == "module"  # it may combine its rows


def test_a_tied_weight_that_is_reduced_twice_is_named():
    ours = ranks({"gradient": [tensor(NAMES[0], 2.0), tensor(NAMES[1])]})
    for each in ours:
        each.tied = [[NAMES[0], "out.weight"]]
    assert "tied weight hidden.weight = out.weight" in found(ours).reason


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (SAMPLES[:2], SAMPLES[:2], "rank 1 repeats the samples of rank 0"),
        (SAMPLES, ["e", "f", "g", "h"], "2 ranks train on 8 samples in a step, 4 each"),
        (SAMPLES[:2], SAMPLES[1:3], "1 samples of the step are trained on by two ranks"),
        (SAMPLES[:2], ["e", "f"], "2 of 4 samples are others than those of one process"),
    ],
)
def test_other_samples_are_an_answer(first, second, words):
    wrong = {"gradient": tensors(factor=0.8)}
    result = found(ranks({"samples": first, **wrong}, {"samples": second, **wrong}))
    assert result.passed is False
    assert words in result.reason


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        ("12", "34", "ranks fetch other batches than one process before the step"),
        ("12", "35", "1 of 4 samples are others than those of one process"),
        ("1234", "5678", "2 ranks train on 8 samples in a step, 4 each, one process on 4"),
    ],
)
def test_batches_of_an_evaluation_do_not_count_where_trained_rows_are_known(first, second, words):
    wrong = {"gradient": tensors(factor=0.8)}
    ours = ranks({"samples": [*SAMPLES, "e", "f"], **wrong}, {"samples": SAMPLES, **wrong})
    rows = [TrainedRows.of([list(step)] * 2, is_whole=True) for step in ("1234", first, second)]
    result = judge([one_process()], [ROUNDED], ours, (rows[:1], rows[1:]))
    assert (result.passed, result.kind) == (False, "samples")
    assert words in result.reason


def test_ranks_that_all_have_the_whole_batch_pass():
    assert found(ranks({"samples": SAMPLES})).passed is True


def test_uneven_shares_without_weights_are_named():
    wrong = {"gradient": [tensor(NAMES[0], 0.9), tensor(NAMES[1], 1.2)]}
    result = found(ranks({"samples": SAMPLES[:3], **wrong}, {"samples": SAMPLES[3:], **wrong}))
    assert "ranks with 1, 3 samples were averaged without weights" in result.reason


def test_another_learning_rate_shows_in_the_change_of_the_weights():
    result = found(ranks({"change": tensors(factor=2.0)}))
    assert (result.passed, result.factor) == (False, 2.0)
    assert "moves hidden.weight differently, by a factor of 2.00" in result.reason


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        ([{"torch": "a"}, {"torch": "b"}], True),
        ([{"torch": "a"}, {"torch": "a"}], False),
        ([{"torch": "a", "numpy": "c"}, {"torch": "a", "numpy": "d"}], False),
        ([{"torch": "a"}], True),  # who knows
    ],
)
def test_random_numbers_of_steps_show_in_the_states_of_generators(states, expected):
    reference = one_process(len(states))
    for each, state in zip(reference.updates, states, strict=True):
        each.generators.update(state)
    assert judge([reference], [], ranks()).draws is expected


def test_replicas_that_drift_apart_fail_at_the_first_step():
    result = found(ranks({}, {"weights": tensors(crc32=3)}))
    assert (result.passed, result.step) == (False, 0)
    assert "hidden.weight of rank 1 is no longer that of rank 0" in result.reason


def test_other_first_weights_fail_before_any_step():
    ours = ranks()
    ours[1].initial = tensors(factor=1.1)
    assert "hidden.weight of rank 1 differs before the first step" in found(ours).reason


def test_a_parameter_that_no_rank_has_is_not_judged():
    ours = ranks()
    for each in ours:
        each.initial = each.initial[:1]
        each.unknown = ["flat"]
    result = found(ours)
    assert result.passed is None
    assert "no rank has head.weight as one process has it, but flat" in result.reason


def test_no_step_is_not_judged():
    assert judge([one_process()], [ROUNDED], [Observed(), Observed()]).passed is None
    assert judge([], [], []).passed is None


def test_several_ranks_are_a_reference_with_the_samples_and_modules_of_all():
    quarters = [[sample] for sample in SAMPLES]
    four = [
        Observed(
            initial=tensors(),
            updates=[update(step, each) for step in range(2)],
            calls=calls(each, scale=4.0),
        )
        for each in quarters
    ]
    result = judge(four, [], ranks())
    assert (result.passed, result.reference) == (True, "4 ranks")
    summed = judge(four, four, ranks({"gradient": tensors(factor=2.0)}))
    assert "summed over 2 ranks" in summed.reason
    less = judge(four, [], ranks({"samples": ["a"], "gradient": tensors(factor=3.0)}))
    assert less.kind == "samples"
    other = judge(four[:3], [], ranks({"gradient": tensors(factor=3.0)}))
    assert "2 ranks train on 4 samples in a step, 2 each, 3 ranks on 3" in other.reason


def noisy(noise=0.2):
    """Changes of which elements with a gradient of roundings differ."""
    return [dataclasses.replace(each, noise_l2=noise) for each in tensors(difference=noise)]


def test_elements_whose_gradient_is_nothing_but_roundings_are_not_compared():
    assert found(ranks({"change": noisy()})).passed is True
    apart = [dataclasses.replace(each, noise_l2=0.1) for each in tensors(difference=0.2)]
    assert (result := found(ranks({"change": apart}))).kind == "update", result


def test_steps_after_such_elements_have_moved_are_not_compared_unless_roundings_are_measured():
    ours = [
        dataclasses.replace(
            each,
            updates=[
                dataclasses.replace(each.updates[0], change=noisy()),
                dataclasses.replace(each.updates[1], gradient=tensors(factor=0.5)),
            ],
        )
        for each in ranks()
    ]
    limited = found(ours)
    assert (limited.passed, limited.steps) == (True, 1)
    assert "only the steps to step 1 were compared with one process" in limited.limit
    first = dataclasses.replace(ROUNDED.updates[0], change=noisy(1e-3))
    measured = dataclasses.replace(ROUNDED, updates=[first, ROUNDED.updates[1]])
    assert judge([one_process()], [measured], ours).passed is False
