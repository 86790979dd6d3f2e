"""Rounds of two ranks in one process, against the training that one process does."""

from __future__ import annotations

import json
from itertools import pairwise

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.support.fabricated_samples import ROWS, FakeFeed, opening, train_alone
from tests.support.trials import changed

from paceline.base.errors import RankFailed
from paceline.base.host.machine import ClockOffset
from paceline.measure.records.files import read_json, read_jsonl
from paceline.measure.records.layout import TrialFiles
from paceline.train.rank import rounds as module
from paceline.train.rank.round_exchange import Orders, together
from paceline.train.rank.rounds import RoundWorker, scaled_state
from paceline.train.training.checkpointing import Segments
from paceline.train.workloads.build import build_model, make_task


@pytest.fixture
def opened(monkeypatch, one_thread):
    """Replaces the data set; returns (rank, feed) of each feed that was opened."""
    feeds = []

    def make_feed(order, *, rank, world_size, **_):
        feeds.append((rank, FakeFeed(order, rank=rank, world_size=world_size)))
        return feeds[-1][1]

    monkeypatch.setattr(module, "open_samples", opening(ROWS, make_feed))
    return feeds


@pytest.fixture
def rounds_of(make_trial, context_of, tmp_path, opened):
    """Makes a trial of two ranks in rounds, and a worker for each."""

    def make(period, **training):
        values = {"epochs": 2, "max_steps": 5, "dropout": False, **training}
        trial = changed(
            make_trial(ranks=2, **values),
            transport="spark-rounds",
            launcher="spark",
            local_strategy="processes",
            averaging={"period_steps": period},
        )
        files = TrialFiles(tmp_path / "trial")
        workers = [RoundWorker(trial, context_of(rank, 2), files) for rank in range(2)]
        for worker in workers:
            worker.begin()
        return trial, files, workers

    return make


def carries_of(report):
    return {rank: told.carry for rank, told in report.ranks.items()}


def train(workers, facts=None):
    """All rounds, as the driver does; the report of the last tasks."""
    report = together(*(w.run(r, Orders(number=0), lambda: None) for r, w in enumerate(workers)))
    number = 1
    while report.ranks[0].next_step < report.ranks[0].steps:
        orders, given = Orders(number=number, carries=carries_of(report)), iter([report.total] * 2)
        report = together(*(w.run(r, orders, given.__next__) for r, w in enumerate(workers)))
        number += 1
    carries, state = carries_of(report), report.total
    orders = Orders(number=number, carries=carries, finish=True, facts=facts or {},
                    clocks={1: ClockOffset(offset_s=0.5, error_s=0.1)})  # fmt: skip
    return together(*(w.finish(r, orders, lambda: state) for r, w in enumerate(workers)))


@pytest.mark.parametrize(
    "training", [{"momentum": 0.0}, {"momentum": 0.9}, {"activation_checkpointing": True}]
)
def test_rounds_of_one_step_are_the_training_of_one_process(rounds_of, training):
    trial, files, workers = rounds_of(1, **training)
    train(workers)
    recomputed = [isinstance(worker._replica.model.forward, Segments) for worker in workers]
    assert recomputed == [trial.training.activation_checkpointing] * 2
    found, expected = load_file(files.weights), train_alone(trial, 5)[1]
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=3e-7)


def test_longer_rounds_stay_near_and_are_not_the_same(rounds_of):
    trial, files, workers = rounds_of(2)
    train(workers)
    found, expected = load_file(files.weights), train_alone(trial, 5)[1]
    initial = build_model(make_task("tiny", classes=3, dropout=False, seed=3)).state_dict()
    apart = sum(float((found[n] - expected[n]).pow(2).sum()) for n in expected) ** 0.5
    moved = sum(float((initial[n] - expected[n]).pow(2).sum()) for n in expected) ** 0.5
    assert 0.001 * moved < apart < 0.5 * moved


def test_every_rank_ends_with_the_same_weights(rounds_of):
    _, files, workers = rounds_of(2)
    train(workers)
    first, second = (read_json(files.rank(rank).weights) for rank in range(2))
    assert first == second
    assert len(first["replicas"][0]) == len(load_file(files.weights))


def test_every_step_is_recorded_once_and_its_phases_add_up(rounds_of):
    _, files, workers = rounds_of(2)
    train(workers)
    for rank in range(2):
        own = files.rank(rank)
        rows = list(read_jsonl(own.steps))
        assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
        assert [row["step"] for row in read_jsonl(own.sample_log)] == [0, 1, 2, 3, 4]
        # the exchange belongs to the step that ends a round; the last round is short
        assert [row["comm_s"] > 0 for row in rows] == [False, True, False, True, True]
        for row, later in pairwise(rows):
            parts = ("data_wait_s", "forward_s", "backward_s", "optimizer_s", "other_s")
            assert sum(row[p] for p in parts) + row["comm_s"] == pytest.approx(row["step_s"])
            ended = row["started_unix_s"] + row["step_s"]
            assert later["started_unix_s"] == pytest.approx(ended, abs=1e-4)


def test_each_round_is_an_operation_with_the_bytes_of_weights_and_momentum(rounds_of):
    _, files, workers = rounds_of(2)
    train(workers, facts={"rounds": 3})
    rows = list(read_jsonl(files.rank(1).communication))
    assert [row["sequence"] for row in rows] == [0, 1, 2]
    parameters = json.loads(files.result.read_text())["parameters"]
    for row in rows:
        assert (row["operation"], row["ranks"]) == ("round", 2)
        assert 8 * parameters <= row["payload_bytes"] < 8.2 * parameters
        assert row["ended_unix_s"] >= row["arrived_unix_s"]
    result = json.loads(files.result.read_text())
    assert result["steps"] == 5
    assert result["classes"] == 3
    assert 0 < result["linear_parameters"] < parameters
    assert (result["input_shape"], result["input_dtype"]) == ([], "uint8")
    assert result["communication"]["momentum"] == "averaged"
    assert result["communication"]["rounds"] == 3


def test_shares_of_a_short_batch_differ_and_all_samples_are_seen_once(rounds_of):
    _, files, workers = rounds_of(3, epochs=1, max_steps=None)
    train(workers)
    seen = [list(read_jsonl(files.rank(rank).sample_log)) for rank in range(2)]
    assert [len(row["sample_ids"]) for row in seen[0]] == [4, 4, 3]
    assert [len(row["sample_ids"]) for row in seen[1]] == [4, 4, 2]
    ids = [i for rows in seen for row in rows for i in row["sample_ids"]]
    assert sorted(ids) == list(range(21))


def test_process_that_becomes_another_rank_goes_on_at_its_step(rounds_of, opened):
    _, files, workers = rounds_of(2)
    train(workers)
    expected = load_file(files.weights)
    for rank in range(2):
        for file in files.rank(rank).root.iterdir():
            file.unlink()
    _, _, (first, second) = rounds_of(2)
    opened.clear()

    class Swapped:  # the processes change places in each round
        def __init__(self, start):
            self.turn = start

        def run(self, rank, orders, state):
            self.turn += 1
            return (first, second)[self.turn % 2].run(rank, orders, state)

        def finish(self, rank, orders, state):
            return second.finish(rank, orders, state)

    train([Swapped(1), Swapped(0)])
    assert [rank for rank, _ in opened] == [0, 1, 0, 1]  # in rounds 1 and 2
    assert sum(feed.closed for _, feed in opened) >= 2
    found = load_file(files.weights)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    for rank in range(2):
        assert [row["step"] for row in read_jsonl(files.rank(rank).steps)] == [0, 1, 2, 3, 4]


def test_clock_that_is_known_at_the_end_is_in_the_environment(rounds_of):
    _, files, workers = rounds_of(5)
    train(workers)
    environments = [json.loads(files.rank(r).environment.read_text()) for r in range(2)]
    assert [e["clock_offset_s"] for e in environments] == [0.0, 0.5]
    assert environments[1]["clock_error_s"] == 0.1
    assert environments[0]["initial_weights_sha256"] == environments[1]["initial_weights_sha256"]


def test_reader_that_ends_early_is_an_error_that_names_the_steps(rounds_of, monkeypatch):
    _, _, workers = rounds_of(2)
    workers[0].run(0, Orders(number=0), lambda: None)
    monkeypatch.setattr(FakeFeed, "__iter__", lambda _self: iter(()))
    workers[0].close()
    with pytest.raises(RankFailed, match="rank 0: expected steps 2 to 3, the data set's"):
        workers[0].run(0, Orders(number=1), lambda: None)


def test_ranks_count_by_their_samples_in_rounds_with_an_uneven_batch(rounds_of):
    """The second round has a step of 5 samples (3 and 2) and one of 8 (4 and 4)."""
    _, _, workers = rounds_of(2, momentum=0.0)
    first = together(*(w.run(r, Orders(number=0), lambda: None) for r, w in enumerate(workers)))
    orders, given = Orders(number=1, carries=carries_of(first)), iter([first.total] * 2)
    second = together(*(w.run(r, orders, given.__next__) for r, w in enumerate(workers)))
    ours, theirs = (scaled_state(worker._replica, 1.0) for worker in workers)
    assert not np.allclose(ours, theirs, rtol=0, atol=1e-5)
    np.testing.assert_allclose(second.total, (7 * ours + 6 * theirs) / 13, rtol=0, atol=1e-7)
