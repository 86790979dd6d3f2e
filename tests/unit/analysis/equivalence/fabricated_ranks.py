"""Fabricated records of two ranks, and the judgement of them."""

from __future__ import annotations

import base64
import zlib

import numpy as np

from paceline.analysis.equivalence.ranks import judge_ranks
from paceline.measure.records.own_steps import (
    BackwardPass,
    Group,
    LossTerm,
    OwnGradient,
    OwnPass,
    OwnStep,
    OwnSteps,
    ReachedRows,
    Sketch,
    State,
    TensorPart,
    UsedGradient,
)

NAMES = ("body.weight", "head.weight")
RANKS = 2


def sketch_of(values):
    raw = np.asarray(values, "<f4").tobytes()
    return Sketch(
        numbers=base64.b64encode(raw).decode(),
        l2=float(np.linalg.norm(values)),
        crc32=zlib.crc32(raw),
        total=float(np.sum(values)),
    )


def own_values(name, rank, number=0):
    return np.random.default_rng([NAMES.index(name), rank, number]).normal(size=64)


def mean(name, passes=1):
    return sum(own_values(name, r, p) for r in range(RANKS) for p in range(passes)) / RANKS


def a_pass(number=0, loss=1.0):
    return BackwardPass(number=number, site="train.py:9", loss=loss)


def term(gradient=1.0, elements=8.0, number=0, **more):
    fields = {"kind": "MseLossBackward0", "is_mean": True, "is_linear": True, **more}
    return LossTerm(number=number, elements=elements, gradient=gradient, **fields)


def own(name, rank, passes=1):
    return OwnGradient(
        place=TensorPart(name=name),
        passes=[
            OwnPass(number=p, fresh=p == 0, first=sketch_of(own_values(name, rank, p)))
            for p in range(passes)
        ],
    )


def weights(value=1.0):
    return [
        State(place=TensorPart(name=name), shape=[64], value=sketch_of(np.full(64, value)))
        for name in NAMES
    ]


def a_step(rank, used, *, passes=1, step=0, **more):
    """used: of a tensor's name, the gradient that the optimiser uses."""
    rows = [
        ReachedRows(
            number=p, call=p, module="Model", checksums=[f"{rank}-{p}-{row}" for row in range(8)]
        )
        for p in range(passes)
    ]
    fields = {
        "weights": weights(),
        "own": [own(name, rank, passes) for name in NAMES],
        "used": [
            UsedGradient(place=TensorPart(name=name), value=sketch_of(used(name))) for name in NAMES
        ],
        "groups": [Group(names=list(NAMES), options={"lr": 0.1})],
        "rows": rows,
        "terms": [term(1 / passes, number=p) for p in range(passes)],
        "passes": [a_pass(p) for p in range(passes)],
    }
    return OwnStep(step=step, optimizer=0, **{**fields, **more})


def judged(*steps, drift=0.0, moved=0.0, **more):
    """Judge a training of one step for each rank.

    drift: of the weights after it, per rank. moved: by the step, on all ranks.
    """
    records = [
        OwnSteps(
            steps=[each],
            after=weights(1 + moved + rank * drift),
            counts=[1],
            optimizers=["SGD"],
            **more,
        )
        for rank, each in enumerate(steps)
    ]
    return judge_ranks(records, 1)


def of_both(used=mean, **more):
    return judged(*(a_step(rank, used, **more) for rank in range(RANKS)))


def first(found):
    return found.findings[0].reason
