"""When the processes of a trial have to be ended, by a clock that the test moves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from tests.support.rows import running_rank

from paceline.measure.records.rows import RankStatus
from paceline.runner.launchers.supervise import WaitLimits, Watch

GONE = 2**22 + 1  # no process has this id
RUNNING = [running_rank(0), running_rank(1)]
DONE = [running_rank(rank, state="done") for rank in (0, 1)]
FAILED = [running_rank(0), running_rank(1, state="failed")]
LOST_A_PEER = [running_rank(0, state="failed", secondary=True), running_rank(1, GONE)]


@dataclass
class Clock:
    """Moves the clock of a Watch."""

    watch: Watch
    now_s: float = 1000.0

    def after(
        self, seconds: float, statuses: list[RankStatus] | None = None, **facts: bool
    ) -> bool:
        self.now_s += seconds
        return self.watch.look(self.now_s, statuses, **facts)

    def dead(self) -> list[int]:
        return list(self.watch.found.dead_ranks)


def clock(**limits: Any) -> Clock:
    usual = {"trial_s": 100.0, "notice_s": 10.0}
    return Clock(Watch(WaitLimits(**{**usual, **limits}), 1000.0))


def test_trial_that_takes_too_long_has_to_be_ended():
    time = clock()
    assert not time.after(100.0, RUNNING)
    assert time.after(0.1)
    assert time.watch.found.timed_out


def test_ranks_have_to_start_within_their_limit():
    time = clock(start_s=20.0, ranks=2)
    assert not time.after(20.0, RUNNING[:1])
    assert not time.after(0.1)  # the statuses were not read
    assert time.after(0.1, RUNNING[:1])
    assert (time.watch.found.missing_ranks, time.watch.found.timed_out) == ((1,), False)


def test_ranks_that_have_started_have_no_limit_for_it():
    assert not clock(start_s=20.0, ranks=2).after(30.0, RUNNING)


def test_launcher_has_a_while_to_end_after_its_ranks():
    time = clock(exit_s=5.0)
    assert not time.after(1.0, DONE)
    assert not time.after(5.0, DONE)
    assert time.after(0.1, DONE)
    assert time.watch.found.stuck_at_exit


def test_rank_that_runs_again_starts_the_wait_for_the_exit_anew():
    time = clock(exit_s=5.0)
    assert not time.after(0.0, DONE)
    assert not time.after(4.0, RUNNING)
    assert not time.after(4.0, DONE)
    assert not time.after(5.0, DONE)
    assert time.after(0.1, DONE)


@pytest.mark.parametrize(
    ("statuses", "facts", "dead"),
    [
        (FAILED, {}, []),
        (None, {"process_failed": True}, []),
        ([running_rank(0), running_rank(1, GONE)], {}, [1]),
        (LOST_A_PEER, {}, [1]),
        ([*FAILED, running_rank(2, GONE)], {}, []),  # Spark kills the others for a reason
        ([running_rank(0), running_rank(1, GONE, host="elsewhere"), *FAILED[1:]], {}, []),
    ],
)
def test_others_have_a_while_to_end_after_a_failure(statuses, facts, dead):
    time = clock()
    assert not time.after(7.0, statuses, **facts)
    assert time.watch.trouble_s == 1007.0
    assert not time.after(10.0)  # what was seen once stays
    assert time.after(0.1)
    assert time.dead() == dead
    assert time.watch.trouble_s == 1007.0


def test_dead_ranks_stay_those_of_the_first_look():
    time = clock()
    time.after(0.0, LOST_A_PEER)
    time.after(0.5, [running_rank(0, GONE), running_rank(1, GONE)])
    assert time.dead() == [1]


def test_launcher_may_replace_its_ranks_in_that_time():
    time = clock(replaces_ranks=True)
    assert not time.after(0.0, LOST_A_PEER)
    assert time.dead() == [1]
    assert not time.after(9.0)
    assert not time.after(0.5, RUNNING)
    assert time.dead() == []
    assert not time.after(50.0, RUNNING)
    assert time.watch.trouble_s == 1000.0, "when the first failure was noticed"
    assert not time.after(0.0, LOST_A_PEER)
    assert time.after(10.1, LOST_A_PEER)


def test_other_launchers_replace_none():
    time = clock()
    assert not time.after(0.0, LOST_A_PEER)
    assert not time.after(9.0, RUNNING)
    assert time.after(1.1, RUNNING)
