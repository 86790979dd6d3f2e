"""Random collectives amid faults: each step is right, or an error on every rank within the limit.

usage: fuzz_faults.py TRANSPORT FOLDER SEED FIRST LAST [RANK RANKS LIMIT_S]     (one rank)

An episode is a new group, steps, one fault or none, and more steps: ranks that disagree, a rank
that is interrupted, absent or killed. The last one ends its ranks, so others begin after it.
TRANSPORT: mpi (started by mpirun; nobody is killed) or paceline.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

LIMIT_S = 1.5  # of each call, unless the test says another one
LATE_S = 3.0  # busy cores
_START_S = 60.0
_AFTER = 3  # steps after the fault
_FAULTS = ("none", "differ", "differ", "interrupt", "interrupt", "absent", "kill")
_ROOTED = ("broadcast", "reduce", "gather", "scatter")
_OPERATIONS = (
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier", *_ROOTED,
)  # fmt: skip
_DTYPES = ("float32", "float64", "int32", "bfloat16")
Outcome = tuple[str, float]  # "right", "error …", "wrong …", "interrupted" or "absent"; seconds


@dataclass(frozen=True)
class Call:
    operation: str
    count: int  # elements of each rank's part
    dtype: str
    root: int
    is_asynchronous: bool


@dataclass(frozen=True)
class Episode:
    steps: tuple[Call, ...]
    fault: str
    victim: int
    other: Call  # of the victim, if the ranks are to disagree
    delay_s: float

    @property
    def at(self) -> int:
        """Return the step with the fault."""
        return len(self.steps) - _AFTER - 1


def draw(seed: int, number: int, ranks: int, *, kills: bool) -> Episode:
    """Return an episode, the same on all ranks."""
    chance = random.Random(f"{seed} {number} {ranks}")
    steps = tuple(_draw_call(chance, ranks) for _ in range(chance.randint(1, 8) + _AFTER))
    fault = chance.choice([fault for fault in _FAULTS if kills or fault != "kill"])
    call = steps[len(steps) - _AFTER - 1]
    return Episode(
        steps, fault, chance.randrange(ranks), _other(chance, call, ranks), chance.random() * 0.01
    )


def _draw_call(chance: random.Random, ranks: int) -> Call:
    return Call(
        chance.choice(_OPERATIONS),
        int(2 ** (chance.random() * 17)) - chance.randint(0, 1),
        chance.choice(_DTYPES),
        chance.randrange(ranks),
        chance.random() < 0.4,
    )


def _other(chance: random.Random, call: Call, ranks: int) -> Call:
    """Return a call that does not fit to the given one."""
    what = chance.choice(("operation", "count", "dtype", "root"))
    if what == "operation" or call.operation == "barrier":
        names = [each for each in _OPERATIONS if each != call.operation]
        return replace(call, operation=chance.choice(names))
    if what == "root" and call.operation in _ROOTED:
        return replace(call, root=(call.root + 1) % ranks)
    if what == "dtype":
        names = [each for each in _DTYPES if each != call.dtype]
        return replace(call, dtype=chance.choice(names))
    return replace(call, count=call.count + 1)


# --- one rank -----------------------------------------------------------------------------------


def _values(call: Call, rank: int, part: int = 0) -> torch.Tensor:
    """Return small whole numbers, which every type holds as it does their sums."""
    numbers = (torch.arange(call.count) + 3 * rank + 5 * part) % 7
    return numbers.to(getattr(torch, call.dtype))


def _begin(call: Call, group: Any, rank: int, ranks: int) -> tuple[Any, Any]:
    """Start a call; return its work, and a function that says whether the result is right."""
    own = _values(call, rank)
    parts = [_values(call, rank, part) for part in range(ranks)]
    empty = [torch.full_like(own, -1) for _ in range(ranks)]
    everyone = [_values(call, other) for other in range(ranks)]
    total = torch.stack(everyone).sum(0).to(own.dtype)
    options: dict[str, Any] = {"group": group, "async_op": call.is_asynchronous}
    root, is_root = call.root, call.root == rank
    got: list[torch.Tensor] = [own]
    want: list[torch.Tensor] = [own]
    match call.operation:
        case "all_reduce":
            work, want = dist.all_reduce(own, **options), [total]
        case "all_gather":
            work, got, want = dist.all_gather(empty, own, **options), empty, everyone
        case "reduce_scatter":
            own = torch.full_like(own, -1)
            work, got = dist.reduce_scatter(own, parts, **options), [own]
            mine = [_values(call, other, rank) for other in range(ranks)]
            want = [torch.stack(mine).sum(0).to(own.dtype)]
        case "all_to_all":
            whole = torch.full_like(torch.cat(parts), -1)
            work, got = dist.all_to_all_single(whole, torch.cat(parts), **options), [whole]
            want = [torch.cat([_values(call, other, rank) for other in range(ranks)])]
        case "barrier":
            work = dist.barrier(**options)
        case "broadcast":
            work, want = dist.broadcast(own, root, **options), [everyone[root]]
        case "reduce":
            work, want = dist.reduce(own, root, **options), [total if is_root else own.clone()]
        case "gather":
            work = dist.gather(own, empty if is_root else None, root, **options)
            got, want = (empty, everyone) if is_root else (got, want)
        case _:
            own = torch.full_like(own, -1)
            work = dist.scatter(own, parts if is_root else None, root, **options)
            got, want = [own], [_values(call, root, rank)]
    return work, lambda: all(map(torch.equal, got, want))


def _step(call: Call, group: Any, rank: int, ranks: int) -> str:
    try:
        work, is_right = _begin(call, group, rank, ranks)
        if work is not None:
            work.wait()
    except Exception as error:  # noqa: BLE001  (told to the judge)
        return f"error {type(error).__name__}: {str(error)[:300]}"
    return "right" if is_right() else f"wrong: {call}"


def _act(episode: Episode, group: Any, rank: int, ranks: int, limit_s: float) -> Iterator[Outcome]:
    for number, planned in enumerate(episode.steps):
        call, fault = planned, "none"
        if number == episode.at and rank == episode.victim:
            fault = episode.fault
            call = episode.other if fault == "differ" else planned
        begun = time.monotonic()
        if fault == "absent":
            time.sleep(limit_s + 0.5)
        signals = {"kill": signal.SIGKILL, "interrupt": signal.SIGINT}
        timer = threading.Timer(episode.delay_s, os.kill, (os.getpid(), signals.get(fault, 0)))
        try:
            if fault in signals:
                timer.start()
            outcome = _step(call, group, rank, ranks)
            if fault in signals:
                timer.join()
                time.sleep(0.01)  # the handler runs
        except KeyboardInterrupt:
            outcome = "interrupted"
        yield "absent" if fault == "absent" else outcome, time.monotonic() - begun


def take_part(words: Sequence[str]) -> None:
    """Write the outcomes of all episodes, in the process of one rank."""
    folder, (seed, first, last) = Path(words[1]), map(int, words[2:5])
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's job may ignore it
    torch.set_num_threads(1)
    limit, limit_s = timedelta(seconds=_START_S), LIMIT_S
    kills = words[0] != "mpi"
    if kills:
        import paceline.distributed

        rank, ranks, limit_s = int(words[5]), int(words[6]), float(words[7])
        store = dist.FileStore(str(folder / f"store.{first}"), ranks)
        dist.init_process_group("paceline", store=store, rank=rank, world_size=ranks, timeout=limit)
    else:
        import paceline.mpi  # noqa: F401  (registers the back end)

        dist.init_process_group("mpi4py", timeout=limit)
        rank, ranks = dist.get_rank(), dist.get_world_size()
    outcomes: dict[int, list[Outcome]] = {}
    for number in range(first, last + 1):
        episode = draw(seed, number, ranks, kills=kills)
        group = dist.new_group(timeout=timedelta(seconds=limit_s))
        outcomes[number] = list(_act(episode, group, rank, ranks, limit_s))
        if episode.fault != "kill":
            dist.barrier()
            dist.destroy_process_group(group)
    (folder / f"{first}.{rank}.json").write_text(json.dumps(outcomes))
    if not kills or draw(seed, last, ranks, kills=kills).fault == "kill":
        os._exit(0)  # what still waits for a lost peer, or in MPI, is not the point here
    dist.destroy_process_group()


# --- all ranks ----------------------------------------------------------------------------------


def judge(
    episode: Episode, by_rank: dict[int, list[Outcome]], limit_s: float = LIMIT_S
) -> list[str]:
    """Return what is wrong with the outcomes of the ranks that live."""
    faults = []
    longest_s = limit_s + LATE_S
    errors = [
        (number, f"rank {rank} step {number} ({took_s:.2f} s): {outcome}")
        for rank, outcomes in by_rank.items()
        for number, (outcome, took_s) in enumerate(outcomes)
        if outcome.startswith("error")
    ]
    first_error, what = min(errors, default=(len(episode.steps), ""))
    if first_error < episode.at and _victim_was_ahead(episode, first_error, what):
        first_error = episode.at
    if errors and (episode.fault == "none" or first_error < episode.at):
        faults.append(f"an error without a fault: {what}")
    for rank, outcomes in by_rank.items():
        is_victim = rank == episode.victim
        for number, (outcome, took_s) in enumerate(outcomes):
            is_error = outcome.startswith("error")
            place = f"rank {rank} step {number} ({took_s:.2f} s): {outcome}"
            if outcome.startswith("wrong"):
                faults.append(place)
            if took_s > longest_s and outcome != "absent":
                faults.append(f"too long: {place}")
            if number > first_error and outcome == "right":
                faults.append(f"right after an error: {place}")
            if episode.fault == "differ" and number == episode.at and "CallsDiffer" not in outcome:
                faults.append(f"not found: {place}")
            stays = episode.fault in ("absent", "kill") and not is_victim
            if stays and number == episode.at + 1 and not is_error:
                faults.append(f"not noticed: {place}")
    return faults


def _victim_was_ahead(episode: Episode, number: int, error: str) -> bool:
    """Return whether an error before the fault comes of it.

    A rank leaves a call with a root as soon as its own part is done. It may be interrupted or
    killed in its next call while others are still in this one.
    """
    return (
        episode.fault in ("interrupt", "kill")
        and all(call.operation in _ROOTED for call in episode.steps[number : episode.at])
        and "PeerLost: " in error
        and re.search(rf"\brank {episode.victim} (\(.*?\) )?has ", error) is not None
    )


def sessions(seed: int, episodes: int, ranks: int, *, kills: bool) -> Iterator[tuple[int, int]]:
    """Yield first and last episode of the same processes; a kill ends them."""
    first = 0
    for number in range(episodes):
        last = number == episodes - 1
        if last or draw(seed, number, ranks, kills=kills).fault == "kill":
            yield first, number
            first = number + 1


def run_session(
    python: Sequence[object],
    folder: Path,
    seed: int,
    first: int,
    last: int,
    ranks: int,
    limit_s: float = LIMIT_S,
) -> list[str]:
    """Run the ranks of back end "paceline"; return what was wrong."""
    command = [*python, __file__, "paceline", folder, seed, first, last]
    processes = [
        subprocess.Popen([str(word) for word in (*command, rank, ranks, limit_s)])
        for rank in range(ranks)
    ]
    deadline = time.monotonic() + _START_S + (last - first + 1) * 4 * (limit_s + LATE_S)
    try:
        for process in processes:
            process.wait(max(0.1, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return [f"episodes {first} to {last} of {ranks} ranks did not end"]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    ended = draw(seed, last, ranks, kills=True)
    killed = ended.victim if ended.fault == "kill" else None
    codes = {rank: process.returncode for rank, process in enumerate(processes) if rank != killed}
    found = [f"rank {rank} ended with {code}" for rank, code in codes.items() if code]
    return found + judge_files(folder, seed, first, last, ranks, kills=True, limit_s=limit_s)


def judge_files(
    folder: Path,
    seed: int,
    first: int,
    last: int,
    ranks: int,
    *,
    kills: bool,
    limit_s: float = LIMIT_S,
) -> list[str]:
    """Return what is wrong in the files that the ranks of a session have written."""
    by_rank = {
        rank: json.loads(file.read_text())
        for rank in range(ranks)
        if (file := folder / f"{first}.{rank}.json").exists()
    }
    faults = []
    for number in range(first, last + 1):
        episode = draw(seed, number, ranks, kills=kills)
        living = {rank: outcomes[str(number)] for rank, outcomes in by_rank.items()}
        if len(living) < ranks - (draw(seed, last, ranks, kills=kills).fault == "kill"):
            faults.append(f"episode {number}: outcomes only of ranks {[*living]}")
        found = judge(episode, living, limit_s)
        faults += [f"episode {number} of {ranks} ranks, {episode.fault}: {each}" for each in found]
    return faults


@dataclass(frozen=True)
class Long:
    """A long form: sessions of several numbers of ranks, some of them at a time.

    episodes: for each number of ranks. minutes: no session begins later.
    """

    seed: int
    episodes: int
    minutes: float
    ranks: tuple[int, ...] = (2, 3, 4, 5)
    at_a_time: int = 4  # ranks mostly wait for those that are absent or killed
    limit_s: float = 6.0  # of each call: the sessions share the cores

    def run(self, python: Sequence[object]) -> dict[str, Any]:
        """Return how many steps and which faults there were, and what was wrong."""
        deadline = time.monotonic() + 60 * self.minutes
        every = [
            (first, last, ranks)
            for ranks in self.ranks
            for first, last in sessions(self.seed, self.episodes, ranks, kills=True)
        ]
        random.Random(self.seed).shuffle(every)
        counts: Counter[str] = Counter()
        faults: list[str] = []

        def judged(first: int, last: int, ranks: int) -> None:
            if time.monotonic() > deadline:
                return
            with tempfile.TemporaryDirectory() as folder:
                faults.extend(
                    run_session(python, Path(folder), self.seed, first, last, ranks, self.limit_s)
                )
            drawn = [draw(self.seed, n, ranks, kills=True) for n in range(first, last + 1)]
            counts["steps"] += sum(len(each.steps) for each in drawn)
            counts.update(each.fault for each in drawn)

        with ThreadPoolExecutor(self.at_a_time) as pool:
            for each in [pool.submit(judged, *session) for session in every]:
                each.result()
        return {"seed": self.seed, "ranks": self.ranks, **counts, "wrong": faults}


if __name__ == "__main__":
    take_part(sys.argv[1:])
