from __future__ import annotations

import re


def test_three_ranks_stay_within_a_round_of_one_another_for_1000_rounds(run_ranks):
    expected = {"result": {"wrong": 0, "seen": 1000}}
    assert run_ranks("counts_rounds", 3) == [expected] * 3


def test_what_was_written_before_a_meeting_is_seen_after_it(run_ranks):
    # 100 000 elements a row
    sums = [[(10 * number + rank) * 100_000 for rank in range(3)] for number in range(30)]
    assert run_ranks("exchanges_data", 3) == [{"result": sums}] * 3


def test_groups_meet_apart_and_outsiders_are_refused(run_ranks):
    refusals = [answer["result"] for answer in run_ranks("meets_in_groups", 4)]
    assert refusals == [
        "local rank 0 is not one of (3, 2)", "local rank 1 is not one of (3, 2)",
        "local rank 2 is not one of (0, 1)", "local rank 3 is not one of (0, 1)",
    ]  # fmt: skip


def test_a_killed_member_is_lost_to_all_others(run_ranks):
    first, killed, last = run_ranks("loses_a_peer", 3)
    assert killed is None
    for answer in (first, last):
        assert answer["error"] == "PeerLost"
        assert re.match(r"local rank 1 of this node \(process \d+\) has died", answer["message"])


def test_who_waits_notices_that_a_rank_it_does_not_wait_for_was_killed(run_ranks):
    waiting, _, killed = run_ranks("loses_a_third", 3)
    assert killed is None
    assert waiting["error"] == "PeerLost"
    assert "local rank 2" in waiting["message"]


def test_a_failure_wakes_all_who_wait_without_their_looking(run_ranks):
    # the one that failed may not go on either
    for answer in run_ranks("fails", 3):
        assert answer["error"] == "PeerLost"
        assert answer["message"].startswith("local rank 1 of this node has failed")


def test_a_wait_that_reaches_its_limit_names_who_is_absent(run_ranks):
    first, absent, last = run_ranks("misses_a_member", 3)
    assert absent == {"result": None}
    for rank, answer in ((0, first), (2, last)):
        assert answer["error"] == "TimedOut"
        assert (
            f"rank {rank} of this node waited 1 s for local rank 1 of this node to meet."
            in answer["message"]
        )


def test_a_rank_that_closed_is_lost_only_to_those_who_wait_for_it(run_ranks):
    first, left, last = run_ranks("leaves_early", 3)
    assert left == {"result": "left"}
    assert last == {"result": "met"}
    assert first["error"] == "PeerLost"
    assert first["message"].startswith("local rank 1 of this node has left")
