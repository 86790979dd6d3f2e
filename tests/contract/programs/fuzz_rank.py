"""One rank's part of the fuzzing."""

from __future__ import annotations

import time
import traceback
import warnings
import zlib
from collections import Counter
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI
from tests.contract.programs.fuzz_cases import REDUCING, Case, draw
from tests.contract.programs.fuzz_operations import Attempt
from tests.contract.programs.fuzz_reference import difference, wanted
from tests.contract.programs.staged import copy_everything

import paceline.distributed  # (back end "paceline")
import paceline.mpi  # (back end "mpi4py", and where the ranks meet)

MPI4PY, GLOO = "mpi4py", "gloo"
_LIMIT = timedelta(seconds=30)
_SUBSETS = 6  # groups beside one another; their ranks are drawn
_UNDER_WAY = 5  # cases begun and not yet waited for, at most
_MEET_EVERY = 100  # cases; then all ranks compare what they found
_FORWARDED_S = 0.5  # until mpirun has passed on what a rank printed last
# What torch's Gloo has; nor does it send to itself.
_GLOO_DTYPES = ("float32", "float64", "float16", "bfloat16", "int8", "uint8", "int32", "int64")
_GLOO_LACKS = ("all_gather_uneven", "all_to_all")
# What back end paceline leaves to Gloo, as it does all operations of a single rank.
_LEFT_TO_GLOO = ("all_to_all", "all_to_all_single", "ring", "blocking_ring", "batched_ring")


def gloo_can(case: Case) -> bool:
    if case.operation in _GLOO_LACKS or (case.operation.endswith("ring") and case.size == 1):
        return False
    if case.operation in REDUCING:
        return case.dtype in _GLOO_DTYPES and case.reduction != "AVG"
    return case.dtype in (*_GLOO_DTYPES, "bool")


class Rank:
    """Draws, carries out and checks cases."""

    def __init__(self, seed: int, backend: str, *, staged: bool) -> None:
        torch.set_num_threads(1)
        if staged:
            copy_everything()
        warnings.filterwarnings("ignore", category=FutureWarning)  # coalesced forms are deprecated
        self._seed = seed
        self._backend = backend
        self._world = MPI.COMM_WORLD
        self._groups: dict[tuple[object, ...], Any] = {}
        self._under_way: list[tuple[Case, list[Attempt]]] = []
        self._counts: Counter[str] = Counter()
        self._failures: list[str] = []
        self._hashes: dict[int, tuple[str, int]] = {}
        dist.init_process_group(backend, timeout=_LIMIT)

    def run(self, numbers: Iterable[int]) -> dict[str, Any] | None:
        """All cases of these numbers; the summary on rank 0."""
        for count, number in enumerate(numbers, 1):
            self._begin(draw(self._seed, number, self._world.size, _SUBSETS))
            if count % _MEET_EVERY == 0:
                self._wait_for_all()
                self._compare_bits()
        self._wait_for_all()
        self._compare_bits()
        found = self._world.gather(self._failures)
        dist.destroy_process_group()
        if found is None:
            return None
        failures = [failure for of_rank in found for failure in of_rank]
        for failure in failures:
            print(failure, flush=True)
        return {
            "ranks": self._world.size,
            "cases": self._counts.pop("cases"),
            "against_gloo": self._counts.pop("against gloo"),
            "failures": len(failures),
            "counts": dict(sorted(self._counts.items())),
        }

    def _begin(self, case: Case) -> None:
        plain = self._is_left_to_gloo(case)
        if plain and not gloo_can(case):
            return
        groups = [(self._group(self._backend, case), plain)]
        if gloo_can(case):
            groups.append((self._group(GLOO, case), True))
        self._count(case, len(groups) == 2)
        if self._world.rank in case.members:
            rank = case.members.index(self._world.rank)
            attempts = [Attempt(case, rank, group, plain=plain) for group, plain in groups]
            try:
                for attempt in attempts:
                    attempt.begin()
            except Exception:  # noqa: BLE001  (told with the case; the peers cannot go on)
                self._give_up(case)
            self._under_way.append((case, attempts))
        if case.waits or len(self._under_way) >= _UNDER_WAY:
            self._wait_for_all()

    def _is_left_to_gloo(self, case: Case) -> bool:
        """Return whether the back end under test passes the case on to Gloo."""
        left = case.operation in _LEFT_TO_GLOO or case.size == 1
        return left and self._backend != MPI4PY

    def _wait_for_all(self) -> None:
        for case, attempts in self._under_way:
            try:
                for attempt in attempts:
                    attempt.end()
                self._check(case, attempts)
            except Exception:  # noqa: BLE001
                self._give_up(case)
        self._under_way.clear()

    def _check(self, case: Case, attempts: list[Attempt]) -> None:
        wants = wanted(case, attempts[0].rank)
        for name, attempt in zip((self._backend, GLOO), attempts, strict=False):
            wrong = None if attempt.plain else attempt.harmed()
            if len(attempt.results) != len(wants):
                wrong = f"{len(attempt.results)} results, expected {len(wants)}"
            for got, want in zip(attempt.results, wants, strict=False):
                wrong = wrong or difference(got, want, loose=attempt.plain)
            if wrong is not None:
                self._failures.append(f"FAILED {name} on rank {self._world.rank}: {wrong}; {case}")
        if case.operation in ("all_reduce", "all_reduce_coalesced"):
            together = torch.cat([tensor.reshape(-1) for tensor in attempts[0].results])
            data = together.view(torch.uint8).numpy()
            self._hashes[case.number] = (str(case), zlib.crc32(data))

    def _compare_bits(self) -> None:
        """All ranks must have got the very same bits from an all-reduce."""
        of_ranks = self._world.allgather(self._hashes)
        self._hashes = {}
        if self._world.rank == 0:
            seen: dict[int, set[int]] = {}
            for hashes in of_ranks:
                for number, (_, value) in hashes.items():
                    seen.setdefault(number, set()).add(value)
            cases = {number: text for hashes in of_ranks for number, (text, _) in hashes.items()}
            self._failures += [
                f"FAILED {self._backend}: ranks got different bits; {cases[number]}"
                for number, values in seen.items()
                if len(values) > 1
            ]

    def _group(self, backend: str, case: Case) -> Any:
        """Made by all ranks when it is used first."""
        algorithm = case.algorithm if backend == MPI4PY else None
        key = (backend, case.members, algorithm)
        if key not in self._groups:
            options = None if algorithm is None else paceline.mpi.Options(algorithm=algorithm)
            self._groups[key] = dist.new_group(
                list(case.members), timeout=_LIMIT, backend=backend, pg_options=options
            )
        return self._groups[key]

    def _count(self, case: Case, against_gloo: bool) -> None:
        self._counts["cases"] += 1
        self._counts["against gloo"] += against_gloo
        self._counts[f"operation {case.operation}"] += 1
        self._counts[f"dtype {case.dtype}"] += 1
        self._counts[f"ranks in group {case.size}"] += 1
        if case.operation in REDUCING:
            self._counts[f"reduction {case.reduction}"] += 1
        if case.operation.startswith("all_reduce"):
            self._counts[f"algorithm {case.algorithm}"] += 1

    def _give_up(self, case: Case) -> None:
        print(f"FAILED on rank {self._world.rank}: {case}\n{traceback.format_exc()}", flush=True)
        time.sleep(_FORWARDED_S)
        self._world.Abort(1)
