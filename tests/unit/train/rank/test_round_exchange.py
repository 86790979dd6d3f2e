"""The steps of a round, the sum of reports, and messages that can be pickled."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from tests.support.rows import STEP

from paceline.train.rank.round_exchange import (
    Carry,
    Orders,
    RankReport,
    Report,
    steps_of_round,
    together,
)


@pytest.mark.parametrize(
    ("period", "steps", "expected"),
    [
        (3, 8, [(0, 1, 2), (3, 4, 5), (6, 7), ()]),
        (4, 8, [(0, 1, 2, 3), (4, 5, 6, 7), ()]),
        (10, 3, [(0, 1, 2), ()]),
        (1, 2, [(0,), (1,), ()]),
    ],
)
def test_steps_fall_into_rounds_without_gap(period, steps, expected):
    found = [tuple(steps_of_round(number, period, steps)) for number in range(len(expected))]
    assert found == expected


def told(rank):
    return RankReport(host="h", cores="{}", next_step=rank, steps=9)


def test_reports_add_up_in_any_tree():
    parts = [Report(ranks={r: told(r)}, total=np.full(3, 2.0**r, np.float32)) for r in range(4)]
    tree = together(together(parts[0], parts[3]), together(parts[2], parts[1]))
    assert tree.total.tolist() == [15, 15, 15]
    assert {rank: report.next_step for rank, report in tree.ranks.items()} == {
        0: 0, 1: 1, 2: 2, 3: 3,
    }  # fmt: skip


def test_reports_without_weights_add_up():
    both = together(Report(ranks={0: told(0)}), Report(ranks={1: told(1)}))
    assert both.total is None
    assert sorted(both.ranks) == [0, 1]


def test_what_travels_survives_pickling():
    carry = Carry(host="h", process_started_unix_s=0.0, train_started_unix_s=1.0, last_step=STEP)
    orders = Orders(number=3, carries={1: carry})
    assert pickle.loads(pickle.dumps(orders)) == orders
    report = Report(ranks={0: told(0)}, total=np.arange(3, dtype=np.float32))
    again = pickle.loads(pickle.dumps(report))
    assert again.ranks == report.ranks
    assert again.total.tolist() == [0, 1, 2]
