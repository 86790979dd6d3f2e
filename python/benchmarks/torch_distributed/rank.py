"""One rank of a job that runs PyTorch's own distributed tests over this backend.

    mpirun -n N python -m mpi4py rank.py FOLDER LIKE BACKEND

Reads FOLDER/tests.txt, a name a line, and writes FOLDER/rank.R.jsonl: a line when a test begins and
one when it has ended. Each test gets a process group of its own. After one that failed on any rank
the job ends with FAILED, since what it left behind might harm the next; the caller starts another.

Which tests PyTorch would run is decided by its own decorators, which read BACKEND when the module
is imported. They are told LIKE: "mpi", PyTorch's own MPI backend (as if torch were built with it).
The few tests that compare PyTorch's BACKEND with the group's own word run with ours. What a
profile must show is checked by PyTorch for a list of backends, in which are only its own.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
import time
import traceback
import unittest
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI

import paceline.distributed
import paceline.mpi  # noqa: F401  (back end "mpi4py", and where the ranks meet)
from paceline.collectives.torch_internals import PrefixStore, TCPStore

OURS = sys.argv[3]
FAILED = 17  # exit status: a test failed, the remaining ones have not run
ASK_FOR_THE_NAME = ("test_get_backend", "test_Backend_enum_class")
LIMIT_S = 30.0  # of every operation
MEET_S = 3 * LIMIT_S  # a rank whose test failed waits for those that wait for it in vain


def test_class(like: str) -> type[unittest.TestCase]:
    """PyTorch's tests, decorated for backend `like`, to be run over ours."""
    os.environ["BACKEND"] = like
    os.environ.setdefault("TEMP_DIR", tempfile.gettempdir())
    dist.is_mpi_available = lambda: True
    from torch.testing._internal.common_utils import TestCase  # noqa: PLC0415  (after BACKEND)
    from torch.testing._internal.distributed import distributed_test as theirs  # noqa: PLC0415

    class TorchDistributed(TestCase, theirs.DistributedTest._DistTestBase):  # noqa: SLF001
        """As PyTorch runs them under mpirun: this process is one rank."""

        rank = MPI.COMM_WORLD.rank
        world_size = MPI.COMM_WORLD.size

        def setUp(self) -> None:
            super().setUp()  # type: ignore[no-untyped-call]
            theirs.BACKEND = OURS if self._testMethodName in ASK_FOR_THE_NAME else like

        def _barrier(self, *_: Any, **__: Any) -> None:
            meet()

    return TorchDistributed


def meet() -> None:
    """A barrier beside the group under test. Raises RuntimeError if a rank does not come."""
    request = MPI.COMM_WORLD.Ibarrier()
    deadline = time.monotonic() + MEET_S
    while not request.Test():
        if time.monotonic() > deadline:
            raise RuntimeError(f"not all ranks came within {MEET_S:g} s")
        time.sleep(1e-3)


def skip_reason(error: BaseException) -> str | None:
    """Why a test could not be run: mostly it left with sys.exit, PyTorch's way to skip it."""
    from torch.testing._internal.common_distributed import TEST_SKIPS  # noqa: PLC0415

    if isinstance(error, ValueError) and "Rank 2 is out of range" in str(error):
        return "makes a group of ranks 1 and 2"  # PyTorch skips it on 2 ranks for other backends
    if not isinstance(error, SystemExit):
        return None
    return next((s.message for s in TEST_SKIPS.values() if s.exit_code == error.code), None)


class Outcome(unittest.TestResult):
    """Of one test: passed, skipped with a reason, or failed with the last lines of its error."""

    kind, detail = "passed", ""

    def addSkip(self, test: Any, reason: str) -> None:  # noqa: ARG002, N802  (unittest's)
        self.kind, self.detail = "skipped", reason

    def addError(self, test: Any, err: Any) -> None:  # noqa: ARG002, N802
        reason = skip_reason(err[1])
        if reason is not None:
            self.kind, self.detail = "skipped", reason
        elif self.kind != "failed":
            self.kind = "failed"
            # names only: where things lie on the machine is nobody's business
            text = "".join(traceback.format_exception(*err))
            self.detail = re.sub(r'File ".*/', 'File "', text)[-1500:]

    addFailure = addError  # noqa: N815


def run_one(test: unittest.TestCase) -> Outcome:
    """Run a test in a process group of its own. Nothing is left of it unless it failed.

    Each group has keys of its own in the store: Gloo would find addresses of the one before.
    """
    outcome = Outcome()
    torch.manual_seed(0)
    world, limit = MPI.COMM_WORLD, timedelta(seconds=LIMIT_S)
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = PrefixStore(test.id(), TCPStore(host, port, timeout=limit))
    dist.init_process_group(
        OURS, store=store, rank=world.rank, world_size=world.size, timeout=limit
    )
    test.run(outcome)
    if outcome.kind != "failed" and dist.is_initialized():
        meet()
        dist.destroy_process_group()
    return outcome


def main() -> None:
    folder, like = Path(sys.argv[1]), sys.argv[2]
    world = MPI.COMM_WORLD
    os.environ["TEMP_DIR"] = str(folder / "temp")
    for name in ("barrier", "test_dir", "init_dir"):
        (folder / "temp" / name).mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    tests = test_class(like)
    with (folder / f"rank.{world.rank}.jsonl").open("a", buffering=1) as report:
        for name in (folder / "tests.txt").read_text().split():
            print(json.dumps({"test": name, "began": time.time()}), file=report)
            outcome = run_one(tests(name))
            row = {"test": name, "outcome": outcome.kind, "detail": outcome.detail}
            print(json.dumps({**row, "ended": time.time()}), file=report)
            meet()
            if world.allreduce(int(outcome.kind == "failed")):
                os._exit(FAILED)


main()
