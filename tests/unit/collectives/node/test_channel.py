from __future__ import annotations


def test_a_slow_receiver_sees_every_slot_of_every_step_unchanged(run_ranks):
    sender, receiver = run_ranks("passes_slots", 2)
    assert sender == {"result": {"slots": 0, "bad": [], "start": 0}}
    assert receiver == {"result": {"slots": 160, "bad": [], "start": 0}}


def test_a_step_may_use_some_slots_in_any_order(run_ranks):
    receiver, _ = run_ranks("uses_some_slots", 2)
    assert receiver == {"result": [2, 1, 0, 10, 12, 21, 30, 31, 32]}


def test_each_end_refuses_the_calls_of_the_other_and_outsiders_all(run_ranks):
    sender, receiver, outsider = run_ranks("uses_the_wrong_end", 3)
    assert sender == {"result": ["wait", "release"]}
    assert receiver == {"result": ["begin", "post"]}
    assert outsider["result"] == ["slot", "begin", "post", "wait", "release"]
