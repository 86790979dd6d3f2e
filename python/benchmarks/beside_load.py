"""Run an experiment on an idle machine and beside known load: does its answer stay the same?

    python beside_load.py --out beside_load.json --runs quickstart_runs [--rounds 5 5 1]

bursts: both cores are taken for 2 to 12 s, about a fifth of the time. one-core: one core is taken
all the time, and a run takes four times as long. Loads rotate within a round. A folder of runs that
exists is continued: what has an outcome is not run again. The machine has to be idle otherwise.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from common import documented_parser, write_results
from paceline.base.host.processes import guarded

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

BUSY_S, IDLE_S = (2.0, 12.0), (8.0, 48.0)  # mean of the idle time: four times that of the busy one
RUN_LIMIT_S = 1500.0
IDLE, BURSTS, ONE_CORE = LOADS = ("idle", "bursts", "one-core")
ROUNDS = (5, 5, 1)
_BURN = "--burn"  # this program, as the load


def main() -> None:
    if sys.argv[1:2] == [_BURN]:
        burn(sys.argv[2], int(sys.argv[3]))
        return
    parser = documented_parser(__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--runs", type=Path, required=True, help="folder of the run directories")
    parser.add_argument("--experiment", default="quickstart")
    parser.add_argument("--rounds", type=int, nargs=len(LOADS), default=ROUNDS, metavar=LOADS)
    options = parser.parse_args()
    rounds = dict(zip(LOADS, options.rounds, strict=True))
    runs = []
    for count in range(max(options.rounds)):
        loads = [load for load in LOADS if count < rounds[load]]
        first = count % len(loads)
        for load in loads[first:] + loads[:first]:
            run_dir = options.runs / f"{load}-{count}"
            if not ended(run_dir).exists():
                measure(options.experiment, run_dir, load, seed=count + 1)
            runs.append({"load": load, "round": count, **conclude(run_dir)})
            last = runs[-1]
            print(f"{load:<9} {count} {last['wall_s']:6.0f} s  {last['separated']} separated")
            found = {"experiment": options.experiment, "loads": summary(runs), "runs": runs}
            write_results(options.out, "beside_load", found)


def measure(experiment: str, run_dir: Path, load: str, seed: int) -> None:
    """Run the experiment beside the load; keep how it ended, if it came to an end."""
    started_s = time.monotonic()
    with burning(load, seed):
        done = subprocess.run(
            guarded(
                [sys.executable, "-m", "paceline.cli", "run", experiment, "--out", str(run_dir)]
            ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            timeout=RUN_LIMIT_S,
            check=False,
        )
    end = {"exit_code": done.returncode, "wall_s": time.monotonic() - started_s}
    ended(run_dir).write_text(json.dumps({**end, "output": done.stdout}) + "\n")


def ended(run_dir: Path) -> Path:
    return run_dir.with_suffix(".json")


@contextmanager
def burning(load: str, seed: int) -> Iterator[None]:
    """Put the load on the machine for the length of the block. It dies with this process."""
    processes = [
        subprocess.Popen(guarded([sys.executable, str(Path(__file__)), _BURN, load, str(seed)]))
        for _ in range({IDLE: 0, BURSTS: 2, ONE_CORE: 1}[load])
    ]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def burn(load: str, seed: int) -> None:
    """Compute for ever, or in bursts. Processes with one seed are busy at the same time."""
    draws = np.random.default_rng(seed)
    while True:
        if load == BURSTS:
            time.sleep(draws.uniform(*IDLE_S))
        until_s = time.monotonic() + draws.uniform(*BUSY_S)
        while time.monotonic() < until_s:
            sum(range(10_000))


def conclude(run_dir: Path) -> Mapping[str, Any]:
    """Return how a run ended, and what it says of each configuration."""
    found = subprocess.run(
        [sys.executable, "-m", "paceline.cli", "compare", str(run_dir), "--json"],
        stdout=subprocess.PIPE,
        check=True,
        timeout=RUN_LIMIT_S,
    )
    document = json.loads(found.stdout)
    speedups = {row["configuration"]: row["speedup"] for row in document["rows"]}
    return {
        **json.loads(ended(run_dir).read_text()),
        "speedups": speedups,
        "repeats": {row["configuration"]: row["repeats"] for row in document["rows"]},
        "others": {k: v for k, v in document["load"].items() if k != "by_trial"},
        "verdict": document["verdict"],
        "separated": sum(found["low"] > 1.0 for found in speedups.values()),
    }


def summary(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each load.

    separated: the fewest configurations that a run separated from one process.
    largest_deviation: of a speedup of two cores without a pipeline, from its median of idle runs.
    """
    idle = [run["speedups"] for run in runs if run["load"] == IDLE]
    usual = {
        name: statistics.median(each[name]["estimate"] for each in idle)
        for name in (idle[0] if idle else ())
        if "pipeline" not in name
    }
    rows = []
    for load in dict.fromkeys(run["load"] for run in runs):
        own = [run for run in runs if run["load"] == load]
        deviations = [
            abs(run["speedups"][name]["estimate"] / speedup - 1)
            for run in own
            for name, speedup in usual.items()
        ]
        rows.append(
            {
                "load": load,
                "runs": len(own),
                "wall_s": statistics.median(run["wall_s"] for run in own),
                "exit_code": max(run["exit_code"] for run in own),
                "configurations": len(own[0]["speedups"]) - 1,
                "separated": min(run["separated"] for run in own),
                "largest_deviation": max(deviations, default=None),
            }
        )
    return rows


if __name__ == "__main__":
    main()
