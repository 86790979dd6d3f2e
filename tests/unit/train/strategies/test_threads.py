"""Replicas in threads; more of their training is in tests/contract/test_strategies.py."""

from __future__ import annotations

import threading
import time

import pytest
from tests.unit.train.strategies.pipeline.node import batch_of, model_of, task_for

from paceline.base.errors import RankFailed
from paceline.train.strategies.threads import ThreadsStrategy
from paceline.train.training.dropout import SampleDropout


@pytest.fixture
def prepare(solo):
    """Prepares the trial's strategy with its initial model; they are closed with the test."""
    strategies = []

    def make(trial):
        strategy = ThreadsStrategy()
        strategies.append(strategy)
        strategy.prepare(task_for(trial), model_of(trial), solo, trial, None)
        return strategy

    yield make
    for strategy in strategies:
        strategy.close(failed=True)


def test_every_thread_prepares_a_part_of_the_images(make_strategy_trial, prepare):
    strategy = prepare(make_strategy_trial("threads", 2))
    done = {}
    strategy.for_parts(7, lambda part: done.update({threading.current_thread().name: part}))
    assert done == {"paceline-replica-0": slice(0, 4), "paceline-replica-1": slice(4, 7)}


def test_times_add_up_to_the_call(make_strategy_trial, prepare):
    trial = make_strategy_trial("threads", 2)
    strategy = prepare(trial)
    started_unix_s, started_s = time.time(), time.perf_counter()
    result = strategy.gradient(batch_of(trial, 0, 6))
    took_s, ended_unix_s = time.perf_counter() - started_s, time.time()
    parts = (result.forward_s, result.backward_s, result.comm_s)
    assert all(part > 0 for part in parts)
    assert sum(parts) <= took_s
    assert started_unix_s <= result.comm_ready_unix_s <= ended_unix_s


def test_weights_are_held_once(make_strategy_trial, prepare):
    strategy = prepare(make_strategy_trial("threads", 3))
    addresses = [{p.data_ptr() for p in r.parameters()} for r in strategy._replicas]
    assert addresses[0] == addresses[1] == addresses[2]
    assert len(addresses[0]) == 12
    assert len({p for r in strategy._replicas for p in r.parameters()}) == 36


def test_error_in_a_replica_ends_the_step_and_names_it(make_strategy_trial, prepare):
    trial = make_strategy_trial("threads", 3, dropout=True)
    strategy = prepare(trial)
    broken = next(m for m in strategy._replicas[1].modules() if isinstance(m, SampleDropout))
    broken.set_keys = lambda *_: None
    with pytest.raises(RankFailed, match="replica 1 of 3 failed: ValueError: SampleDropout"):
        strategy.gradient(batch_of(trial, 0, 6))
    strategy.close(failed=True)
    assert not [t for t in threading.enumerate() if t.name.startswith("paceline-replica")]


def test_workers_are_told(make_strategy_trial, prepare):
    workers = prepare(make_strategy_trial("threads", 2)).workers()
    assert [w.worker for w in workers] == [0, 1]
    assert [w.intraop_threads for w in workers] == [1, 1]
    assert len({w.thread_id for w in workers}) == 2
