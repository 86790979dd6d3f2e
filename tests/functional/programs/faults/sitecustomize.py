"""On PYTHONPATH: makes one worker of a trial raise in the middle of its training, or slows all.

FAULT_RANK: the rank that raises (of `local` ranks that are children, or 0), or FAULT_THREAD: the
end of the name of the thread that does. SLEEP_S: seconds that each forward pass takes longer. The
patch waits for the training loop to be imported, since torch must not be imported before the rank
has been given its threads. ABSENT_RANK: the barrier task of Spark that stays away from the others.
CLOCK_STEP: SECONDS:FILE, a step of the wall clock of every process, when the file appears.
"""

import importlib.abc
import importlib.util
import os
import sys
import threading
import time

_LOOP = "paceline.train.rank.loop"
_BARRIER = "paceline.runner.launchers.spark.barrier"
_CALLS = 40  # of ReLU.forward: some steps


class _Finder(importlib.abc.MetaPathFinder):
    """Calls a function with a module that has been imported."""

    def __init__(self, name, then):
        self._name, self._then = name, then

    def find_spec(self, name, path=None, target=None):
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            self._then(module)

        spec.loader.exec_module = exec_module
        return spec


def _change_training(loop):
    if "SLEEP_S" in os.environ:
        _slow_down(float(os.environ["SLEEP_S"]))
    else:
        _seed_fault()


def _stay_away(barrier):
    healthy = barrier.run_barrier_rank

    def run_barrier_rank(job, rank, stage):
        if rank == int(os.environ["ABSENT_RANK"]):
            time.sleep(600)
        return healthy(job, rank, stage)

    barrier.run_barrier_rank = run_barrier_rank


def _seed_fault():
    from torch import nn

    healthy = nn.ReLU.forward
    calls = 0

    def forward(self, units):
        nonlocal calls
        if _is_here():
            calls += 1
            if calls == _CALLS:
                raise ArithmeticError("seeded fault")
        return healthy(self, units)

    nn.ReLU.forward = forward


def _slow_down(seconds):
    from torch.nn import AdaptiveAvgPool2d  # each of our models has one

    quick = AdaptiveAvgPool2d.forward

    def forward(self, units):
        time.sleep(seconds)
        return quick(self, units)

    AdaptiveAvgPool2d.forward = forward


def _step_clock(seconds, file):
    steady = time.time
    time.time = lambda: steady() + (seconds if os.path.exists(file) else 0.0)  # noqa: PTH110


def _is_here():
    thread = os.environ.get("FAULT_THREAD")
    if thread is not None:
        return threading.current_thread().name.endswith(thread)
    return os.environ.get("PACELINE_RANK", "0") == os.environ["FAULT_RANK"]


if "CLOCK_STEP" in os.environ:
    _seconds, _, _file = os.environ["CLOCK_STEP"].partition(":")
    _step_clock(float(_seconds), _file)
if {"FAULT_RANK", "FAULT_THREAD", "SLEEP_S"} & set(os.environ):
    sys.meta_path.insert(0, _Finder(_LOOP, _change_training))
if "ABSENT_RANK" in os.environ:
    sys.meta_path.insert(0, _Finder(_BARRIER, _stay_away))
