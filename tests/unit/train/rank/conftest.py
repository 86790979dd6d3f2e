"""Fixtures of the tests of a rank."""

from __future__ import annotations

import pytest
import torch
from tests.support.fabricated_samples import ROWS, FakeFeed, opening

from paceline.train.rank import rounds
from paceline.train.rank import train as worker


@pytest.fixture
def one_thread(monkeypatch):
    """Pytest's process has threads of its own; test_resources.py looks at a fresh one."""
    for module in (worker, rounds):
        monkeypatch.setattr(module, "set_threads", lambda _: None)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(torch, "get_num_interop_threads", lambda: 1)


@pytest.fixture
def photos(monkeypatch, one_thread):
    """Replaces the data set; returns the sample orders that the worker made."""
    orders = []

    def make_feed(order, **_):
        orders.append(order)
        return FakeFeed(order)

    monkeypatch.setattr(worker, "open_samples", opening(ROWS, make_feed))
    return orders
