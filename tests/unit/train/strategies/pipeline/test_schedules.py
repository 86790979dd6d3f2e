from __future__ import annotations

from itertools import product

import pytest

from paceline.analysis.trial.phases import theoretical_bubble
from paceline.train.strategies.pipeline.stage import Backward, Forward, actions

SIZES = list(product((1, 2, 3, 4), (1, 2, 3, 8)))  # stages, micro-batches


def finish_times(schedule, stages, micro_batches):
    """Runs all stages by the rules of data flow: a forward pass takes 1, a backward pass 2."""
    plans = [actions(schedule, stage, stages, micro_batches) for stage in range(stages)]
    done, clocks = {}, [0] * stages
    while any(plans):
        ready = [
            (stage, needs)
            for stage, plan in enumerate(plans)
            if plan and (needs := waits_for(plan[0], stage, stages)) <= done.keys()
        ]
        assert ready, f"deadlock: {plans}"
        for stage, needs in ready:
            action = plans[stage].pop(0)
            start = max([clocks[stage], *(done[n] for n in needs)])
            clocks[stage] = start + (1 if isinstance(action, Forward) else 2)
            done[stage, action] = clocks[stage]
    return clocks


def waits_for(action, stage, stages):
    needs = set()
    if isinstance(action, Forward) and stage > 0:
        needs.add((stage - 1, action))
    if isinstance(action, Backward):
        needs.add((stage, Forward(action.micro_batch)))
        if stage < stages - 1:
            needs.add((stage + 1, action))
    return needs


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("stages", "micro_batches"), SIZES)
def test_each_micro_batch_goes_forward_and_then_backward_once(schedule, stages, micro_batches):
    for stage in range(stages):
        plan = actions(schedule, stage, stages, micro_batches)
        assert [a.micro_batch for a in plan if isinstance(a, Forward)] == [*range(micro_batches)]
        assert [a.micro_batch for a in plan if isinstance(a, Backward)] == [*range(micro_batches)]
        for i in range(micro_batches):
            assert plan.index(Forward(i)) < plan.index(Backward(i))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("stages", "micro_batches"), SIZES)
def test_equal_stages_idle_as_long_as_theory_says(schedule, stages, micro_batches):
    whole = max(finish_times(schedule, stages, micro_batches))
    idle = 1 - 3 * micro_batches / whole
    assert idle == pytest.approx(theoretical_bubble(stages, micro_batches))


@pytest.mark.parametrize(("stages", "micro_batches"), SIZES)
def test_1f1b_holds_no_more_micro_batches_than_stages_that_follow(stages, micro_batches):
    for stage in range(stages):
        assert most_held(actions("1f1b", stage, stages, micro_batches)) == min(
            stages - stage, micro_batches
        )
        assert most_held(actions("gpipe", stage, stages, micro_batches)) == micro_batches


def most_held(plan):
    held, most = 0, 0
    for action in plan:
        held += 1 if isinstance(action, Forward) else -1
        most = max(most, held)
    return most
