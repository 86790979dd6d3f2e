"""Cost of many ranks on one node that share memory (`processes`), as their number grows.

    python node_scale.py --out results/raw/node_scale.json [--ranks 2 64] [--repeats 3]
        [--workload tiny] [--steps 12]

The ranks have one thread each and share the cores of this node. Each is a fork of this process,
which has imported what ranks need; then it trains as under a launcher. All clocks of a host agree,
so the costs are from the last rank's arrival to the last rank's departure:

open_s: opening what the ranks share: the constructor of SharedNode, its memory and its barriers
prepare_s: everything until the strategy can train, opening included
barrier_s: all barriers of a step; posts: semaphores that a rank posts in them
empty_barrier_s: a barrier without work before it

Memory of the node, summed over its ranks: weights_pss_bytes is the part of the weights that the
kernel attributes to each (Pss), so all ranks together have it once if it is shared.
private_bytes has what belongs to one rank alone, without the pages that forks share.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from common import documented_parser, forked, made_dataset, median_interval, shown, write_results
from paceline.collectives.host import host_name
from paceline.collectives.node.semaphores import Barrier, Semaphores
from paceline.collectives.node.shared_node import SharedNode
from paceline.measure.records.documents import begin_attempt
from paceline.measure.records.layout import TrialFiles
from paceline.plan.spec.loading import parse_spec
from paceline.plan.trials.planning import plan_trials
from paceline.plan.trials.trial import RankContext, StoreAddress, Trial
from paceline.runner.job.job import close_listener, listen_on
from paceline.train.rank import train as rank
from paceline.train.strategies.shared_shards import SharedShardsStrategy
from paceline.train.training.resources import apply_resources

SPEC = """
schema = 2
name = "node-scale"
repeats = 1
[training]
max_steps = {steps}
epochs = 1000
warmup_steps = {warmup}
global_batch = {batch}
[limits]
rendezvous_s = 300
collective_s = 300
[[workloads]]
name = "{workload}"
data = "unused"
[[trials]]
launcher = "local"
local_strategy = "sequential"
[[trials]]
launcher = "local"
local_strategy = "processes"
ranks_per_node = {ranks}
threads_per_rank = 1
oversubscribe = true
"""
WARMUP_STEPS = 2
EMPTY_BARRIERS = 50
LIMIT_S = 540.0
POLL_S = 0.02
MEASURES = ("open_s", "prepare_s", "barrier_s", "empty_barrier_s", "posts")
MEMORY = ("weights_pss_bytes", "private_bytes")


class Watched:
    """Times, posts and memory of this rank; `install` before the ranks are forked."""

    def __init__(self) -> None:
        self.prepare: list[tuple[float, float]] = []
        self.opened: list[tuple[float, float]] = []  # each call
        self.steps: list[list[tuple[float, float]]] = []  # each barrier of each step
        self.posts: list[int] = []  # of each step
        self.empty: list[tuple[float, float]] = []
        self.memory: dict[str, int] = {}
        self._in_step = self._in_call = False
        self._posts = 0

    def install(self) -> None:
        node, barrier, strategy = SharedNode, Barrier, SharedShardsStrategy
        semaphores, replace = Semaphores, _replace
        for name in ("__init__", "memory", "memories", "barrier"):
            replace(node, name, self._opening)
        replace(strategy, "prepare", self._prepared)
        replace(strategy, "gradient", self._began)
        replace(strategy, "step", self._stepped)
        replace(strategy, "close", self._closed)
        replace(barrier, "wait", self._waited)
        replace(semaphores, "post", self._posted)

    def _opening(self, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        if self._in_call:
            return call(*arguments, **options)
        self._in_call = True
        with timed(self.opened):
            found = call(*arguments, **options)
        self._in_call = False
        return found

    def _prepared(
        self, call: Callable[..., Any], strategy: Any, task: Any, model: nn.Module, *others: Any
    ) -> None:
        self._model = model
        with timed(self.prepare):
            call(strategy, task, model, *others)
        self._in_call = True
        barrier = strategy._shared.barrier(range(strategy._ranks))  # noqa: SLF001
        for _ in range(EMPTY_BARRIERS):
            with timed(self.empty):
                barrier.wait()

    def _began(self, call: Callable[..., Any], *arguments: Any) -> Any:
        self._in_step, self._posts = True, 0
        self.steps.append([])
        return call(*arguments)

    def _stepped(self, call: Callable[..., Any], *arguments: Any) -> Any:
        found = call(*arguments)
        self._in_step = False
        self.posts.append(self._posts)
        return found

    def _waited(self, call: Callable[..., Any], *arguments: Any) -> None:
        with timed(self.steps[-1] if self._in_step else []):
            call(*arguments)

    def _posted(self, call: Callable[..., Any], *arguments: Any) -> None:
        self._posts += 1
        call(*arguments)

    def _closed(self, call: Callable[..., Any], *arguments: Any, **options: Any) -> None:
        if not self.memory:
            largest = max(self._model.parameters(), key=lambda p: p.numel())
            weights = memory_of(largest.data_ptr())
            own = memory_of(None)
            self.memory = {
                "weights_pss_bytes": weights["Pss"],
                "private_bytes": own["Private_Clean"] + own["Private_Dirty"],
            }
        call(*arguments, **options)


@contextmanager
def timed(spans: list[tuple[float, float]]) -> Iterator[None]:
    """Append begin and end of the block."""
    started_s = time.perf_counter()
    yield
    spans.append((started_s, time.perf_counter()))


def _replace(owner: Any, name: str, by: Callable[..., Any]) -> None:
    """Let `by` be called in place of a method, with the method first."""
    method = getattr(owner, name)
    setattr(owner, name, lambda *a, **o: by(method, *a, **o))


def memory_of(address: int | None) -> dict[str, int]:
    """Return the bytes of this process's mapping at an address, or of all, by kind (proc(5))."""
    found: dict[str, int] = {}
    is_inside = True
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, rest = line.partition(" ")
        if not name.endswith(":"):
            begin, end = (int(each, 16) for each in name.split("-"))
            is_inside = address is None or begin <= address < end
        elif is_inside and rest.endswith("kB"):
            kind = name.removesuffix(":")
            found[kind] = found.get(kind, 0) + 1024 * int(rest.split()[0])
    return found


def planned(workload: str, ranks: int, steps: int, dataset: Path) -> Trial:
    text = SPEC.format(
        workload=workload, ranks=ranks, steps=steps, warmup=WARMUP_STEPS, batch=2 * ranks
    )
    trials = plan_trials(parse_spec(text, "benchmark"), {workload: str(dataset)}, ranks)
    trial = next(each for each in trials if not each.is_baseline)
    return trial.model_copy(update={"save_tensors": False})


def run(trial: Trial, folder: Path) -> list[dict[str, Any]]:
    """Train once; return what each rank has seen. Raises RuntimeError if a rank fails."""
    files = TrialFiles(folder)
    address = listen_on(trial.interface)
    with started(trial, files, address) as children:
        close_listener(address)  # rank 0 has inherited it
        deadline_s = time.monotonic() + LIMIT_S
        running = set(children)
        while running:
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"not done within {LIMIT_S:g} s")
            for child in list(running):
                pid, status = os.waitpid(child, os.WNOHANG)
                running -= {pid}
                if status:
                    raise RuntimeError(f"rank {children.index(child)} ended with {status}")
            time.sleep(POLL_S)  # os.waitpid has no limit
    return [json.loads((folder / f"seen {n}.json").read_text()) for n in range(len(children))]


@contextmanager
def started(trial: Trial, files: TrialFiles, address: StoreAddress) -> Iterator[list[int]]:
    """Start the ranks; they end with the block."""
    files.root.mkdir(parents=True)
    children: list[int] = []
    try:
        for number in range(trial.placement.ranks):
            children.append(start(trial, files, address, number))  # noqa: PERF401  (each is ended)
        yield children
    finally:
        for child in children:
            subprocess.run(["kill", "-9", str(child)], check=False, stderr=subprocess.DEVNULL)


def start(trial: Trial, files: TrialFiles, address: StoreAddress, number: int) -> int:
    """Start a rank in a fork; return its process id."""
    seen = Watched()

    def train() -> None:
        ranks = trial.placement.ranks
        descriptor = address.listen_fd if number == 0 else None
        context = RankContext(
            rank=number, world_size=ranks, local_rank=number, ranks_on_node=ranks, node_index=0,
            host=host_name(), process_started_unix_s=time.time(),
            store=dataclasses.replace(address, listen_fd=descriptor),
        )  # fmt: skip
        begin_attempt(files.rank(number))
        apply_resources(context, trial)
        seen.install()
        rank.train(trial, context, files)
        names = ("opened", "prepare", "steps", "posts", "empty", "memory")
        values = {name: getattr(seen, name) for name in names}
        (files.root / f"seen {number}.json").write_text(json.dumps(values))

    return forked(train)


def slowest_s(ranks: Sequence[list[tuple[float, float]]]) -> list[float]:
    """Return for each span the time from the last rank's begin to the last one's end.

    ranks: the same spans on each rank.
    """
    return [
        max(end for _, end in same) - max(begin for begin, _ in same)
        for same in zip(*ranks, strict=True)
    ]


def costs(seen: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the costs of a run, from what its ranks have seen."""
    steps = [sum(slowest_s(each)) for each in zip(*(each["steps"] for each in seen), strict=True)]
    return {
        "open_s": sum(slowest_s([each["opened"] for each in seen])),
        "prepare_s": sum(slowest_s([each["prepare"] for each in seen])),
        "barrier_s": statistics.median(steps[WARMUP_STEPS:]),
        "empty_barrier_s": statistics.median(slowest_s([each["empty"] for each in seen])),
        "posts": max(max(each["posts"][WARMUP_STEPS:]) for each in seen),
        "barriers": len(seen[0]["steps"][-1]),
        **{name: sum(each["memory"][name] for each in seen) for name in MEMORY},
    }


def main() -> None:
    options = arguments()
    torch.set_num_threads(1)  # forks cannot use a thread pool of this process
    raw: dict[int, list[dict[str, Any]]] = {ranks: [] for ranks in options.ranks}
    with tempfile.TemporaryDirectory(prefix="paceline-benchmark-") as temporary:
        folder = Path(temporary)
        dataset = options.data or made_dataset(
            folder, options.workload, 2 * max(options.ranks), LIMIT_S
        )
        for repeat in range(options.repeats):
            for ranks, found in raw.items():
                trial = planned(options.workload, ranks, options.steps, dataset)
                found.append(costs(run(trial, folder / f"{ranks} {repeat}")))
                print(f"{ranks} ranks: {found[-1]}", file=sys.stderr)
    rows = []
    for ranks, found in raw.items():
        summary = {name: median_interval([each[name] for each in found]) for name in MEASURES}
        for name, interval in summary.items():
            shown(f"{ranks} ranks, {name}", interval)
        memory = {name: statistics.median(each[name] for each in found) for name in MEMORY}
        rows.append({"ranks": ranks, **summary, **memory, "raw": found})
    write_results(options.out, "node_scale", {"workload": options.workload, "rows": rows})


def arguments() -> argparse.Namespace:
    parser = documented_parser(__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.json")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 64], help="on the node")
    parser.add_argument("--repeats", type=int, default=3, help="interleaved")
    parser.add_argument("--workload", default="tiny", help="one with images (default: tiny)")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--data", type=Path, metavar="DATA_SET", help="default: a synthesised one")
    return parser.parse_args()


if __name__ == "__main__":
    main()
