from __future__ import annotations

import ctypes
import threading
import time

import numpy as np
import pytest

from paceline.base.errors import EnvironmentLacks
from paceline.collectives.node import semaphores as module
from paceline.collectives.node.semaphores import LINE_BYTES, Semaphores


@pytest.fixture
def pair():
    memory = np.zeros(3 * LINE_BYTES, np.uint8)
    start = -memory.ctypes.data % LINE_BYTES
    return Semaphores(memory[start : start + 2 * LINE_BYTES], initialise=True)


def test_each_counts_for_itself(pair):
    pair.post(1)
    pair.post(1)
    assert len(pair) == 2
    assert not pair.take(0, 0.0)
    assert [pair.take(1, 0.0) for _ in range(3)] == [True, True, False]


def test_a_sleeper_is_woken(pair):
    poster = threading.Timer(0.02, pair.post, [0])
    poster.start()
    assert pair.take(0, 20.0)
    poster.join()


def test_without_a_monotonic_wait_the_older_one_is_used(pair, monkeypatch):
    class Older(ctypes.CDLL):
        def __getattr__(self, name):
            if name == "sem_clockwait":
                raise AttributeError(name)
            return super().__getattr__(name)

    monkeypatch.setattr(ctypes, "CDLL", Older)
    library = module._Library()
    assert library.clock == time.CLOCK_REALTIME
    pair._library = library
    assert not pair.take(0, 0.01)
    poster = threading.Timer(0.02, pair.post, [0])
    poster.start()
    assert pair.take(0, 20.0)
    poster.join()


def test_a_c_library_without_semaphores_is_explained(monkeypatch):
    def missing():
        raise AttributeError("undefined symbol: sem_init")

    monkeypatch.setattr(module, "_Library", missing)
    with pytest.raises(EnvironmentLacks, match="undefined symbol: sem_init"):
        Semaphores(np.zeros(LINE_BYTES, np.uint8), initialise=True)
