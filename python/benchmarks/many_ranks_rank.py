"""One rank of many_ranks.py: real communication beside computation that sleeps."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from mpi4py import MPI

import paceline.mpi
from paceline.collectives.mpi.message_collectives import MessageCollectives
from paceline.collectives.mpi.world import RankNames
from simulation_job import ALL_GATHER

if TYPE_CHECKING:
    from pathlib import Path

_LINK_BYTES = 4 * 2**20
_EMPTY_BYTES = 4
_EMPTY_MESSAGES = 50  # one after another, because ranks do not begin at once
_LINK_REPEATS = 5
WORLD = MPI.COMM_WORLD


def run_rank(job_text: str, file: Path) -> None:
    """Measure everything that the job describes; rank 0 writes it."""
    torch.set_num_threads(1)
    job = json.loads(job_text)
    limit_s = job["limit_s"]
    messages = MessageCollectives(WORLD.Dup(), RankNames.gather(WORLD, limit_s), limit_s)
    options = paceline.mpi.Options(algorithm="ring")
    limit = timedelta(seconds=limit_s)
    dist.init_process_group("mpi4py", timeout=limit, pg_options=options)
    factors = dist.new_group(timeout=limit, pg_options=options)
    measured = {
        "link": link(limit_s),
        "collectives": collectives(job, messages),
        "steps": steps(job, factors),
    }
    if WORLD.rank == 0:
        file.write_text(json.dumps(measured))
    dist.destroy_process_group()


def link(limit_s: float) -> dict[str, Any]:
    """Return latency and bandwidth between the ranks of a pair, of the slowest pair.

    All pairs exchange messages in both directions at the same time. An odd rank out waits.
    """
    pair = WORLD.Split(WORLD.rank // 2, WORLD.rank)
    exchange = MessageCollectives(pair, RankNames.gather(pair, limit_s), limit_s)

    def exchanged(nbytes: int, messages: int) -> None:
        if pair.size == 2:
            buffer = np.zeros(nbytes // 4, np.float32)
            for _ in range(messages):
                exchange.allreduce(buffer, np.add, "recursive-doubling")

    raw = {
        nbytes: _repeated(partial(exchanged, nbytes, messages))
        for nbytes, messages in ((_EMPTY_BYTES, _EMPTY_MESSAGES), (_LINK_BYTES, 1))
    }
    # the shortest times: other processes on this machine only add to them
    latency_s, long_s = min(raw[_EMPTY_BYTES]) / _EMPTY_MESSAGES, min(raw[_LINK_BYTES])
    return {
        "latency_s": latency_s,
        "bytes_per_s": _LINK_BYTES / (long_s - latency_s),
        "raw_s": {str(nbytes): seconds for nbytes, seconds in raw.items()},
    }


def _repeated(run: Callable[[], None]) -> list[float]:
    run()
    return [slowest_s(run) for _ in range(_LINK_REPEATS)]


def collectives(job: dict[str, Any], messages: MessageCollectives) -> list[dict[str, Any]]:
    """Measure every algorithm with every payload, repeats interleaved."""
    cases = [
        {"algorithm": algorithm, "payload_bytes": payload, "raw_s": []}
        for payload in job["payloads"]
        for algorithm in job["algorithms"]
    ]
    runs = [operation(case["algorithm"], case["payload_bytes"], messages) for case in cases]
    for number in range(job["rounds"] + 1):
        for case, run in zip(cases, runs, strict=True):
            took_s = slowest_s(run)
            if number > 0:  # the first round opens connections
                case["raw_s"].append(took_s)
    return cases


def operation(algorithm: str, payload: int, messages: MessageCollectives) -> Callable[[], None]:
    if algorithm == ALL_GATHER:
        own = torch.zeros(payload // 4)
        everyone = torch.empty(WORLD.size * len(own))
        return lambda: dist.all_gather_single(everyone, own)
    buffer = np.zeros(payload // 4, np.float32)
    return lambda: messages.allreduce(buffer, np.add, algorithm)  # type: ignore[return-value]


def steps(job: dict[str, Any], factors: dist.ProcessGroup) -> dict[str, list[float]]:
    """Measure steps of both kinds, interleaved."""
    found: dict[str, list[float]] = {"gradients": [], "hybrid": []}
    for number in range(job["steps"] + 1):
        for name, raw in found.items():
            took_s = slowest_s(partial(step, job, factors, is_hybrid=name == "hybrid"))
            if number > 0:
                raw.append(took_s)
    return found


def step(job: dict[str, Any], factors: dist.ProcessGroup, *, is_hybrid: bool) -> None:
    """Sleep for the passes, and send as soon as a layer is ready."""
    linear = {name: values for name, *values in job["layers"] if values[0] is not None}
    works = []
    time.sleep(job["forward_s"])
    if is_hybrid:
        works += [gather(inputs, job, factors) for inputs, _, _ in reversed(linear.values())]
    for name, inputs, outputs, share in job["layers"]:
        time.sleep(share * job["backward_s"])
        if is_hybrid and name in linear:
            works.append(gather(outputs, job, factors))
        else:
            elements = outputs if inputs is None else outputs * (inputs + 1)
            works.append(dist.all_reduce(torch.zeros(elements), async_op=True))
    for work in works:
        work.wait()


def gather(features: int, job: dict[str, Any], group: dist.ProcessGroup) -> Any:
    own = torch.zeros(job["samples"] * features)
    everyone = torch.empty(WORLD.size * len(own))
    return dist.all_gather_single(everyone, own, group=group, async_op=True)


def slowest_s(run: Callable[[], Any]) -> float:
    """Return the time of the slowest rank, on all ranks."""
    own = np.zeros(1)
    WORLD.Barrier()
    started_s = time.perf_counter()
    run()
    own[0] = time.perf_counter() - started_s
    WORLD.Allreduce(MPI.IN_PLACE, own, MPI.MAX)
    return float(own[0])
