"""Random communication over a back end of ours, checked against Gloo and against plain arithmetic.

usage: fuzz.py [--backend mpi4py] [--staged] [--ranks 2 3 4] [--cases 3000] [--seed 1]
               [--only CASE] [--json FILE]

Starts itself under mpirun, once for each number of ranks. A case that fails is printed with its
number; `--only NUMBER` with the same seed and ranks repeats it alone.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(REPOSITORY))
BACK_ENDS = ("mpi4py", "paceline")


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, prog="fuzz.py")
    parser.add_argument("--backend", choices=BACK_ENDS, default=BACK_ENDS[0])
    parser.add_argument("--staged", action="store_true", help="mpi4py: as tensors of a GPU")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--cases", type=int, default=3000, help="for each number of ranks")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, help="the number of one case")
    parser.add_argument("--json", type=Path, help="where the summary goes, instead of stdout")
    return parser.parse_args(argv)


def start(options: argparse.Namespace) -> int:
    """Run all numbers of ranks one after the other; 1 if a case failed."""
    summaries: list[dict[str, Any]] = []
    for ranks in options.ranks:
        words = ["--backend", options.backend, "--cases", options.cases, "--seed", options.seed]
        words += [] if options.only is None else ["--only", options.only]
        words += ["--staged"] if options.staged else []
        command = [
            Path(sys.executable).with_name("mpirun"), "-n", ranks, "--oversubscribe", "--bind-to",
            "none", "--mca", "btl", "self,sm", sys.executable, "-m", "mpi4py", __file__, *words,
        ]  # fmt: skip
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        }
        done = subprocess.run(
            [str(word) for word in command], env=environment, stdout=subprocess.PIPE, text=True,
            check=False,
        )  # fmt: skip
        last = done.stdout.strip().rpartition("\n")[2]
        summaries.append(
            json.loads(last) if last.startswith("{") else {"ranks": ranks, "died": last}
        )
        print(done.stdout, file=sys.stderr)
    text = json.dumps(
        {"backend": options.backend, "seed": options.seed, "runs": summaries}, indent=1
    )
    if options.json is None:
        print(text)
    else:
        options.json.write_text(text + "\n")
    return int(any("died" in s or s["failures"] for s in summaries))


def take_part(options: argparse.Namespace) -> int:
    """As one rank. Rank 0 prints what failed anywhere, and the summary as its last line."""
    from tests.contract.programs.fuzz_rank import Rank

    started = time.monotonic()
    rank = Rank(options.seed, options.backend, staged=options.staged)
    numbers = range(options.cases) if options.only is None else [options.only]
    summary = rank.run(numbers)
    if summary is None:
        return 0
    print(json.dumps({**summary, "wall_s": round(time.monotonic() - started, 1)}), flush=True)
    return int(summary["failures"] > 0)


if __name__ == "__main__":
    # Under the tests' mpirun the transport and a folder come first: all programs are given them.
    words = sys.argv[3:] if sys.argv[1:2] == ["mpi"] else sys.argv[1:]
    if "OMPI_COMM_WORLD_RANK" in os.environ:
        sys.exit(take_part(parse(words)))
    sys.exit(start(parse(words)))
