"""DDP over Gloo, over back end paceline, and with its buckets in place: how fast is a training?

    python back_ends.py --out back_ends.json [--models alexnet gpt] [--ranks 2 4]

The trainings live in the same ranks, of one thread each, and differ in the back end only: same
weights, samples and dropout. They take turns of a few steps, in an order drawn anew for each round;
a ratio is that of a round. The ranks divide a batch. "one-core": beside a process that is always
busy. "nothing" sends no gradients, and so is the bound. CPU time hardly depends on other programs.

All but "nothing" must have equal weights afterwards: with two ranks bit for bit, as a sum of two
numbers does not depend on their order, else within rounding.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import Any

import psutil

from beside_load import LOADS, burning
from common import documented_parser, median_interval, paired_ratio, shown, write_results
from mpi_job import output_of

MODELS = ("alexnet", "gpt", "deeplab", "alexnet-bf16")
BATCH = 16  # of all ranks
BF16 = "-bf16"
LARGE = "alexnet"  # all trainings of four ranks would need 13 GB
OPTIONS = {"gpt": {"width": 512, "heads": 8}}  # 12.6 million parameters in its blocks
GLOO, PACELINE, IN_PLACE, NOTHING = WAYS = ("gloo", "paceline", "in_place", "nothing")
WARM_UP = 2  # rounds, in which DDP makes its buckets anew
ROUNDING = 1e-5
LIMIT_S = 1800.0
_RANK = "--rank"


def main() -> None:
    if sys.argv[1:2] == [_RANK]:
        run_rank(sys.argv[2], *map(int, sys.argv[3:6]))
        return
    options = arguments()
    found: list[dict[str, Any]] = []
    if options.resume and options.out.exists():
        found = json.loads(options.out.read_text("utf-8"))["configurations"]
    known = {(each["model"], each["ranks"], each["load"]) for each in found}
    for case in product(options.models, options.ranks, options.loads):
        if case not in known and not (case[0].startswith(LARGE) and case[1] > 2):
            found.append(measure(*case, options))
            write_results(options.out, "back_ends", {"configurations": found})


def arguments() -> argparse.Namespace:
    parser = documented_parser(__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=["idle", "one-core"])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--resume", action="store_true", help="keep what the file has")
    parser.add_argument("--steps", type=int, default=1, help="of a turn")
    return parser.parse_args()


def measure(model: str, ranks: int, load: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run the ranks, and return their rates. Raises RuntimeError if the weights differ."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    own = [ranks, __file__, _RANK, model, options.rounds, options.steps, BATCH // ranks]
    with burning(load, seed=1):
        told = output_of([*command, *own], LIMIT_S, GLOO_SOCKET_IFNAME="lo")
    rank0 = json.loads(told.splitlines()[-1])
    if not rank0["largest_difference"] <= (0.0 if ranks == 2 else ROUNDING):  # or no number
        raise RuntimeError(f"{model}, {ranks} ranks: weights differ by {rank0}")
    rates = {way: [BATCH / each for each in times] for way, times in rank0["step_s"].items()}
    cpu_s = rank0["step_cpu_s"]
    ratios = {
        "paceline_over_gloo": paired_ratio(rates[PACELINE], rates[GLOO]),
        "in_place_over_gloo": paired_ratio(rates[IN_PLACE], rates[GLOO]),
        "in_place_over_nothing": paired_ratio(rates[IN_PLACE], rates[NOTHING]),
        "cpu_gloo_over_paceline": paired_ratio(cpu_s[GLOO], cpu_s[PACELINE]),
        "cpu_gloo_over_in_place": paired_ratio(cpu_s[GLOO], cpu_s[IN_PLACE]),
        "cpu_nothing_over_in_place": paired_ratio(cpu_s[NOTHING], cpu_s[IN_PLACE]),
    }
    for name, ratio in ratios.items():
        shown(f"{model}, {ranks} ranks, {load}: {name}", ratio, "x")
    medians = {f"{way}_samples_per_s": median_interval(values) for way, values in rates.items()}
    return {"model": model, "ranks": ranks, "load": load, **ratios, **medians, **rank0}


# --- one rank -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Training:
    """One of the trainings. step: trains on the batch of a number."""

    model: Any
    step: Callable[[int], None]


def run_rank(name: str, rounds: int, steps: int, batch: int) -> None:
    """Train in turns; rank 0 prints the seconds of a step of each turn, and what differs."""
    import torch  # noqa: PLC0415  (the parent needs none of it)
    import torch.distributed as dist  # noqa: PLC0415

    import paceline.distributed  # noqa: F401, PLC0415  (back end "paceline")

    torch.set_num_threads(1)
    limit = timedelta(seconds=300)
    dist.init_process_group("gloo", timeout=limit)
    trainings = {way: created(way, name, batch, limit) for way in WAYS}
    order = random.Random(1)  # noqa: S311
    step_s: dict[str, list[float]] = {way: [] for way in WAYS}
    step_cpu_s: dict[str, list[float]] = {way: [] for way in WAYS}
    for number in range(WARM_UP + rounds):
        if number == WARM_UP:
            began_s, machine_s, own_s = used_s()
        for way in order.sample(WAYS, len(WAYS)):
            took_s, cpu_s = turn(trainings[way], range(number * steps, (number + 1) * steps))
            if number >= WARM_UP:
                step_s[way].append(took_s / steps)
                step_cpu_s[way].append(cpu_s / steps)
    ended_s, machine_end_s, own_end_s = used_s()
    others_s = machine_end_s - machine_s - (own_end_s - own_s)
    found = {
        "step_s": step_s,
        "step_cpu_s": step_cpu_s,
        "largest_difference": largest_difference(
            [training.model for way, training in trainings.items() if way != NOTHING]
        ),
        "others_cores": others_s / (ended_s - began_s),  # used by other programs
    }
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def largest_difference(models: Sequence[Any]) -> float:
    """Return that of a parameter of the first model from the same one of another."""
    first, *rest = ([*model.parameters()] for model in models)
    return max(
        float((ours.detach() - theirs.detach()).abs().max())
        for parameters in rest
        for ours, theirs in zip(first, parameters, strict=True)
    )


def turn(training: Training, numbers: range) -> tuple[float, float]:
    """Train on the batches of these numbers; return the seconds that the slowest rank needed, and
    the CPU seconds of all threads of all ranks."""
    import torch  # noqa: PLC0415
    import torch.distributed as dist  # noqa: PLC0415

    dist.barrier()
    began_s, cpu_began_s = time.perf_counter(), time.process_time()
    for number in numbers:
        training.step(number)
    took_s = torch.tensor(time.perf_counter() - began_s, dtype=torch.float64)
    cpu_s = torch.tensor(time.process_time() - cpu_began_s, dtype=torch.float64)
    dist.all_reduce(took_s, dist.ReduceOp.MAX)
    dist.all_reduce(cpu_s)
    return float(took_s), float(cpu_s)


def created(way: str, name: str, batch: int, limit: timedelta) -> Training:
    """Create a model and its process group; collective."""
    import torch  # noqa: PLC0415
    import torch.distributed as dist  # noqa: PLC0415
    from torch.nn.parallel import DistributedDataParallel  # noqa: PLC0415

    from paceline.distributed import share_buckets  # noqa: PLC0415

    torch.manual_seed(1)
    bare, loss_of, inputs, targets = workload(name, batch)
    backend = PACELINE if way in (PACELINE, IN_PLACE) else GLOO
    group = dist.new_group(backend=backend, timeout=limit)
    model = DistributedDataParallel(bare, process_group=group)
    if way == IN_PLACE:
        share_buckets(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)

    def step(number: int) -> None:
        torch.manual_seed(number)  # of dropout
        optimizer.zero_grad()
        with (
            torch.autocast("cpu", torch.bfloat16, enabled=name.endswith(BF16)),
            model.no_sync() if way == NOTHING else nullcontext(),
        ):
            loss = loss_of(model(inputs), targets).mean()
            loss.backward()
        optimizer.step()

    return Training(model, step)


def workload(name: str, batch: int) -> tuple[Any, Callable[[Any, Any], Any], Any, Any]:
    """Return a model, its loss, and a batch of this rank."""
    import numpy as np  # noqa: PLC0415
    import torch  # noqa: PLC0415
    import torch.distributed as dist  # noqa: PLC0415

    from bare_ddp import alexnet  # noqa: PLC0415
    from paceline.train.workloads.build import make_task  # noqa: PLC0415

    generator = torch.Generator().manual_seed(dist.get_rank())
    if name.removesuffix(BF16) == "alexnet":
        images = torch.randn(batch, 3, 224, 224, generator=generator)
        labels = torch.randint(3, (batch,), generator=generator)
        return alexnet(3), torch.nn.CrossEntropyLoss(), images, labels
    workload_name = "gpt-small" if name == "gpt" else name
    task = make_task(workload_name, image_size=64, samples=64, options=OPTIONS.get(name, {}))
    items = task.dataset()
    assert items is not None, "these tasks make their samples"
    first = dist.get_rank() * batch
    pairs = [items[number % 64] for number in range(first, first + batch)]
    inputs, targets = (np.stack(each) for each in zip(*pairs, strict=True))
    return task.model(), task.loss, task.to_input(inputs), torch.from_numpy(targets).long()


def used_s() -> tuple[float, float, float]:
    """Return the time, and the CPU seconds of the machine and of all ranks; collective."""
    import torch  # noqa: PLC0415
    import torch.distributed as dist  # noqa: PLC0415

    own_s = torch.tensor(time.process_time(), dtype=torch.float64)
    dist.all_reduce(own_s)
    machine = psutil.cpu_times()
    return time.monotonic(), machine.user + machine.nice + machine.system, float(own_s)


if __name__ == "__main__":
    main()
