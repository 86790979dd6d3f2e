"""One rank of factor_grid.py: measures both options for each case, interleaved."""

from __future__ import annotations

import json
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

import paceline.mpi
from paceline.plan.costs import LinearShape, all_reduce_cost, factor_cost
from paceline.train.strategies.reduction.factor_choice import measure
from paceline.train.strategies.reduction.factor_exchange import FactorExchange, open_group
from paceline.train.training.tensors import weight_gradient

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_OTHERS = 2**18  # float32 of other gradients: 1 MB
_LAYER = "layer"
_COLLECTIVE_S = 120.0


class Case:
    """Both options for one layer."""

    def __init__(self, shape: LinearShape, samples: int, group: dist.ProcessGroup | None) -> None:
        self._samples = samples
        elements = shape.inputs * shape.outputs
        self._flat = torch.zeros(_OTHERS + elements)  # gradients of several layers share a message
        self._others, own = self._flat[:_OTHERS], self._flat[_OTHERS:]
        self._gradient = own.view(shape.outputs, shape.inputs)
        self._inputs = torch.randn(samples, shape.inputs)
        self._gradients = torch.randn(samples, shape.outputs)
        self._exchange = FactorExchange()
        self._exchange.open({_LAYER: shape}, samples, torch.float32, group)

    def all_reduce(self) -> None:
        weight_gradient(self._inputs, self._gradients, self._gradient)
        dist.all_reduce(self._flat)

    def factors(self) -> None:
        self._exchange.begin(self._samples)
        self._exchange.keep_inputs(_LAYER, self._inputs)
        self._exchange.keep_gradients(_LAYER, self._gradients)
        reduced = dist.all_reduce(self._others, async_op=True)
        inputs, gradients = self._exchange.wait(_LAYER)
        weight_gradient(inputs, gradients, self._gradient)
        reduced.wait()


def run_rank(job_text: str, file: Path) -> None:
    """Measure the cases of the job until its limit; rank 0 writes them."""
    torch.set_num_threads(1)
    job = json.loads(job_text)
    options = paceline.mpi.Options() if job["transport"] == "mpi4py" else None
    limit = timedelta(seconds=_COLLECTIVE_S)
    dist.init_process_group(job["transport"], timeout=limit, pg_options=options)
    group = open_group(_COLLECTIVE_S)
    deadline_s = time.monotonic() + job["limit_s"]
    cases: list[dict[str, Any]] = []
    for shape, samples in job["cases"]:
        if largest(time.monotonic() - deadline_s) < 0:
            cases.append(measured(shape, samples, group, job["repeats"]))
    if dist.get_rank() == 0:
        left_out = len(job["cases"]) - len(cases)
        file.write_text(json.dumps({"cases": cases, "left_out": left_out}))
    dist.barrier()
    dist.destroy_process_group()


def measured(
    text: str, samples: int, group: dist.ProcessGroup | None, repeats: int
) -> dict[str, Any]:
    inputs, outputs = map(int, text.split("x"))
    shape = LinearShape(inputs=inputs, outputs=outputs, has_bias=False)
    ranks = dist.get_world_size()
    # as a training with this layer does before its first step
    speeds, _ = measure(group, None, shape, samples * ranks, torch.float32)
    reduced = all_reduce_cost(shape, ranks, speeds).seconds
    gathered = factor_cost(shape, samples, 4, ranks, speeds).seconds
    assert reduced is not None
    assert gathered is not None
    case = Case(shape, samples, group)
    raw: dict[str, list[float]] = {"all_reduce_s": [], "factors_s": []}
    for number in range(repeats + 1):
        for name, run in (("all_reduce_s", case.all_reduce), ("factors_s", case.factors)):
            took_s = slowest_s(run)
            if number > 0:
                raw[name].append(took_s)
    return {
        "shape": text,
        "samples": samples,
        "sends_factors": gathered < reduced,
        "predicted_s": {"all_reduce": reduced, "factors": gathered},
        "predicted_ratio": gathered / reduced,
        **raw,
    }


def slowest_s(run: Callable[[], None]) -> float:
    """Return the time of the slowest rank, on all ranks."""
    dist.barrier()
    started_s = time.perf_counter()
    run()
    return largest(time.perf_counter() - started_s)


def largest(value: float) -> float:
    own = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(own, op=dist.ReduceOp.MAX)
    return float(own)
