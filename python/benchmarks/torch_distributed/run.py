"""Runs PyTorch's own distributed tests over one of our back ends, and says which pass.

    python torch_distributed/run.py --out mpi_backend.json
    python torch_distributed/run.py --backend paceline --like gloo --out paceline_backend.json

The tests are torch.testing._internal.distributed.distributed_test, which the wheel brings. Counted
are those that PyTorch runs for its own MPI backend on a machine without GPUs, at each number of
ranks; beside it, those that it runs for Gloo. A table goes to standard output.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.base.host.machine import machine_facts, package_versions

RANK = Path(__file__).with_name("rank.py")
MODULE = "torch.testing._internal.distributed.distributed_test"
PATIENCE_S = 150.0  # for one test; its operations give up after 30 s
START_S = 120.0
Rows = dict[str, dict[str, Any]]

# Why a test does not pass.
_GLOO_ONLY = "torch.distributed.monitored_barrier refuses every backend but Gloo"
_NEEDS_GLOO_WORDS = "looks for Gloo's words in the error, which ours says in others"
REASONS = {
    "test_barrier_timeout_global": _NEEDS_GLOO_WORDS,
    "test_barrier_timeout_group": _NEEDS_GLOO_WORDS,
    "test_barrier_timeout_full_group": _NEEDS_GLOO_WORDS,
    "test_monitored_barrier_gloo": _GLOO_ONLY,
    "test_monitored_barrier_gloo_subgroup": _GLOO_ONLY,
    "test_monitored_barrier_gloo_rank_0_timeout": _GLOO_ONLY,
    "test_monitored_barrier_failure_order": _GLOO_ONLY,
    "test_monitored_barrier_wait_all_ranks": _GLOO_ONLY,
    "test_ddp_logging_data_cpu": "expects the name gloo",
    "test_sparse_all_reduce_sum": "sparse tensors are refused, with a message that says so",
}


def test_names() -> list[str]:
    """Return the names of PyTorch's tests, all of which only an import of them tells."""
    program = (
        f"import {MODULE} as m; "
        "print(*(n for n in vars(m.DistributedTest._DistTestBase) if n.startswith('test_')))"
    )
    environment = {**os.environ, "BACKEND": "mpi", "WORLD_SIZE": "2"}
    said = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True,
        timeout=START_S, check=True,
    )  # fmt: skip
    return said.stdout.split()


def run_tests(names: list[str], ranks: int, like: str, folder: Path, backend: str) -> Rows:
    """Return the outcome of each test on `ranks` ranks: {"outcome", "detail", "seconds"}.

    passed: on all ranks; skipped: on all ranks; else failed. A job ends with the first failure,
    so there are as many jobs as failures, and one.
    """
    rows: Rows = {}
    job = 0
    while left := [name for name in names if name not in rows]:
        job += 1
        found = run_job(left, ranks, like, folder / f"ranks{ranks}.{job}", backend)
        if not found:
            log = (folder / f"ranks{ranks}.{job}" / "log.txt").read_text()
            raise RuntimeError(f"no test began:\n{log[-3000:]}")
        rows.update(found)
    return rows


def run_job(
    names: list[str],
    ranks: int,
    like: str,
    folder: Path,
    backend: str = "mpi4py",
    python: Sequence[str] = (sys.executable, "-m", "mpi4py"),
) -> Rows:
    """Run `names` in one mpirun, up to the first that fails; return the outcomes.

    python: the words of a command in front of the program of a rank.
    """
    folder.mkdir(parents=True)
    (folder / "tests.txt").write_text("\n".join(names) + "\n")
    command = [
        Path(sys.executable).with_name("mpirun"), "-n", ranks, "--oversubscribe",
        "--bind-to", "none", "--mca", "btl", "self,sm",
        *python, RANK, folder, like, backend,
    ]  # fmt: skip
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "WORLD_SIZE": str(ranks),  # PyTorch's decorators read it
        "GLOO_SOCKET_IFNAME": "lo",
    }
    with (
        (folder / "log.txt").open("w") as log,
        subprocess.Popen(
            [str(word) for word in command], env=environment, stdout=log,
            stderr=subprocess.STDOUT, start_new_session=True,
        ) as process,
    ):  # fmt: skip
        try:
            hung = not _goes_on_to_its_end(process, folder)
        finally:
            _end(process)
    return _outcomes(folder, ranks, hung)


def _goes_on_to_its_end(process: subprocess.Popen[bytes], folder: Path) -> bool:
    """Wait for the end of a job; False if a test takes too long."""
    deadline, written = time.monotonic() + START_S, 0
    while process.poll() is None:
        size = sum(file.stat().st_size for file in folder.glob("rank.*.jsonl"))
        if size != written:
            written, deadline = size, time.monotonic() + PATIENCE_S
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a job that still runs, with all of its processes."""
    if process.poll() is None:
        process.terminate()  # mpirun ends its ranks
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def _outcomes(folder: Path, ranks: int, hung: bool) -> Rows:
    lines = [_lines(folder / f"rank.{rank}.jsonl") for rank in range(ranks)]
    began = {row["test"]: row["began"] for row in lines[0] if "began" in row}
    ended = [{row["test"]: row for row in each if "outcome" in row} for each in lines]
    rows: Rows = {}
    for name, began_unix_s in began.items():
        outcomes = [each.get(name) for each in ended]
        kinds = Counter(row["outcome"] if row else "failed" for row in outcomes)
        kind = "failed" if kinds["failed"] else max(kinds, key=lambda k: (kinds[k], k == "passed"))
        if kinds["passed"]:  # a rank that has nothing to do may skip
            kind = "failed" if kinds["failed"] else "passed"
        lost = "it did not end" if hung else "the job ended with it"
        details = [row["detail"] if row else lost for row in outcomes]
        last = max((row["ended"] for row in outcomes if row), default=began_unix_s)
        rows[name] = {
            "outcome": kind,
            "detail": next((d for d in details if d), ""),
            "seconds": round(last - began_unix_s, 3),
        }
    return rows


def _lines(file: Path) -> list[dict[str, Any]]:
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")]


def summary(worlds: dict[str, Rows]) -> dict[str, Any]:
    """Sum up all numbers of ranks: a test counts if any runs it, and passes if none fails."""
    outcomes: dict[str, set[str]] = {}
    for rows in worlds.values():
        for name, row in rows.items():
            outcomes.setdefault(name, set()).add(row["outcome"])
    counted = {name: kinds - {"skipped"} for name, kinds in outcomes.items()}
    failed = [name for name, kinds in counted.items() if "failed" in kinds]
    passed = [name for name, kinds in counted.items() if kinds == {"passed"}]
    ran = len(failed) + len(passed)
    return {
        "ran": ran,
        "passed": len(passed),
        "share": round(len(passed) / ran, 4) if ran else None,
        "failed": {name: REASONS.get(name, "no reason known") for name in failed},
    }


def table(suites: dict[str, dict[str, Rows]]) -> str:
    """A Markdown table: one row for each backend's tests and number of ranks."""
    lines = ["| tests | ranks | run | passed | failed |", "|---|---|---|---|---|"]
    for like, worlds in suites.items():
        for ranks, rows in worlds.items():
            kinds = Counter(row["outcome"] for row in rows.values())
            run = kinds["passed"] + kinds["failed"]
            lines.append(f"| {like} | {ranks} | {run} | {kinds['passed']} | {kinds['failed']} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--backend", choices=["mpi4py", "paceline"], default="mpi4py")
    parser.add_argument("--tests", nargs="+", help="only these (default: all of the class)")
    parser.add_argument(
        "--like", choices=["mpi", "gloo"], nargs="+", default=["mpi", "gloo"],
        help="the backends whose tests are run, as PyTorch's decorators choose them",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    arguments = parser.parse_args()
    names = arguments.tests or test_names()
    suites: dict[str, dict[str, Rows]] = {}
    with tempfile.TemporaryDirectory(prefix="torch-distributed-") as folder:
        for like in arguments.like:
            suites[like] = {
                str(ranks): run_tests(names, ranks, like, Path(folder) / like, arguments.backend)
                for ranks in arguments.ranks
            }
    if arguments.out:
        write(arguments.out, suites)
    print(table(suites))
    for like, worlds in suites.items():
        found = summary(worlds)
        print(f"\n{found['passed']} of {found['ran']} that PyTorch runs for {like} pass")
        for name, reason in found["failed"].items():
            print(f"- {name}: {reason}")


def write(file: Path, suites: dict[str, dict[str, Rows]]) -> None:
    document = {
        "tests": MODULE,
        "command": " ".join(["python", *(word.rpartition("/")[2] for word in sys.argv)]),
        "date": time.strftime("%Y-%m-%d"),
        "host": {k: v for k, v in machine_facts().items() if k != "host"},
        "versions": package_versions(),
        "suites": {
            like: {"summary": summary(worlds), "ranks": worlds} for like, worlds in suites.items()
        },
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
