"""Do lab hosts that take turns on the same cores agree with hosts that have cores of their own?

    python turns.py --list
    python turns.py --raw results/raw/turns.jsonl --piece b-1gbit-factors --pairs 2
    python turns.py --raw results/raw/turns.jsonl --conclude results/raw/turns.json

Needs root and two idle cores. A piece measures pairs: the same with hosts in turns and with real
cores, in alternating order, of one to two minutes each; its rows are added to those that are there.

a-STRATEGY   one host of two cores, with an empty second one in turns, against the host alone
b-LINK-WHAT  two hosts of one core each, with all gradients or with factors
c-SLICE      the same at 1 Gbit/s with all gradients, with slices of 5, 10 and 20 ms
d-LINK       all-reduces of MPI between the hosts, 1 KB to 25 MB

Ratios are those of the median step in turns over that with real cores, of each pair. Speedups are
over the sequential training of the same run.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from common import documented_parser, median_interval, paired_ratio, shown, write_results
from mpi_job import mpirun, output_of
from paceline.analysis.trial.reading import load_run
from paceline.analysis.trial.steps import global_steps, read_steps
from paceline.analysis.trial_analysis import analyse_trial
from paceline.base.errors import PacelineError
from paceline.measure.records.files import JsonlWriter, read_jsonl
from paceline.measure.records.layout import RunFiles
from paceline.measure.records.virtual_clock import RecordedSlices, overlap_ns
from paceline.runner.lab import INTERFACE, Lab, LabSettings

LINKS = ("10gbit", "1gbit", "100mbit")
STRATEGIES = ("intraop", "threads", "processes", "pipeline", "sharded")
SLICES_MS = (5, 10, 20)
SIZES_BYTES = (1_000, 10_000, 100_000, 1_000_000, 5_000_000, 25_000_000)
LIMIT_S = 220.0
ALLOWED = {"10gbit": 0.05, "1gbit": 0.05, "100mbit": 0.1}  # difference of speedups
ALL = "all"
_RANK = "--rank"
_CALLS_S = 1.5  # calls of one size

_TASK = f"{Path(__file__).with_name('tasks.py').resolve()}:Balanced"
_BALANCED = f'name = "balanced"\ntask = "{_TASK}"\nglobal_batch = 64\nlearning_rate = 0.001\n'
_ALEXNET = 'name = "simple-big"\nsamples = 64\nglobal_batch = 64\n'
WORKLOADS = {"balanced": _BALANCED, "alexnet": _ALEXNET}
SPEC = """
schema = 2
name = "turns"
seed = 1
repeats = 1
[[workloads]]
{workload}max_steps = {steps}
epochs = {steps}
warmup_steps = 1
[[trials]]
launcher = "local"
local_strategy = "sequential"
{trial}
[network]
interface = "{interface}"
[mpi]
hostfile = "{hostfile}"
[limits]
trial_s = 100
"""
ONE_HOST = '[[trials]]\nlauncher = "local"\nlocal_strategy = "{}"\n'
TWO_HOSTS = """[[trials]]
launcher = "mpi"
transport = "mpi"
local_strategy = "sequential"
nodes = 2
sufficient_factors = "{}"
"""


@dataclass(frozen=True)
class Piece:
    """A comparison of one spec on hosts with cores of their own, and on hosts in turns."""

    trial: str  # beside the sequential one; empty: all-reduces
    real: LabSettings
    turns: LabSettings
    steps: int = 8


def pieces() -> dict[str, Piece]:
    one = LabSettings(hosts=1, cores=2, bandwidth="1gbit")
    found = {
        f"a-{strategy}": Piece(ONE_HOST.format(strategy), one, replace(one, hosts=2, turns=True))
        for strategy in STRATEGIES
    }
    for link in LINKS:
        real = LabSettings(hosts=2, cores=1, bandwidth=link)
        turns = replace(real, turns=True)
        found[f"b-{link}-gradients"] = Piece(TWO_HOSTS.format("never"), real, turns)
        found[f"b-{link}-factors"] = Piece(TWO_HOSTS.format("auto"), real, turns)
        found[f"d-{link}"] = Piece("", real, turns)
    middle = found["b-1gbit-gradients"]
    for slice_ms in SLICES_MS:
        turns = replace(middle.turns, slice_ms=slice_ms)
        found[f"c-{slice_ms}ms"] = replace(middle, turns=turns)
    return dict(sorted(found.items()))


def main() -> None:
    if sys.argv[1:2] == [_RANK]:
        run_rank()
        return
    parser = documented_parser(__doc__)
    parser.add_argument("--raw", type=Path, metavar="FILE.jsonl", help="rows of all pieces")
    parser.add_argument("--piece", nargs="+", choices=[ALL, *pieces()], metavar="PIECE", default=[])
    parser.add_argument("--workload", choices=WORKLOADS, default="balanced")
    parser.add_argument("--pairs", type=int, default=1, help="of each piece; default: 1")
    parser.add_argument("--list", action="store_true", help="print the pieces")
    parser.add_argument("--conclude", type=Path, metavar="FILE.json")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the lab is removed then
    if options.list:
        print("\n".join(pieces()))
        return
    if options.raw is None:
        parser.error("--raw: expected a file")
    for name in pieces() if ALL in options.piece else options.piece:
        measure(name, options)
    if options.conclude is not None:
        rows = list(read_jsonl(options.raw))
        write_results(options.conclude, "turns", {"pairs": rows, "conclusions": concluded(rows)})


def measure(name: str, options: argparse.Namespace) -> None:
    """Add pairs of a piece to the raw rows."""
    piece = pieces()[name]
    known = list(read_jsonl(options.raw)) if options.raw.exists() else []
    first = sum((row["piece"], row["workload"]) == (name, options.workload) for row in known)
    for number in range(first, first + options.pairs):
        pair: dict[str, Any] = {"piece": name, "workload": options.workload, "pair": number}
        for mode in ("real", "turns") if number % 2 == 0 else ("turns", "real"):
            started_s = time.monotonic()
            settings = piece.turns if mode == "turns" else piece.real
            pair[mode] = measured(piece, settings, WORKLOADS[options.workload])
            pair[mode]["took_s"] = time.monotonic() - started_s
        with JsonlWriter(options.raw) as writer:
            writer.write(pair)
        show(pair)


def measured(piece: Piece, settings: LabSettings, workload: str) -> dict[str, Any]:
    """Return the steps of each trial, or the all-reduces, in the time of the hosts."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        try:
            with Lab(settings, logs=folder / "logs") as lab:
                if piece.trial:
                    found = trained(piece, workload, lab, folder)
                else:
                    found = all_reduced(lab, folder)
        except PacelineError as error:
            raise SystemExit(f"turns.py: {error}") from error
        if settings.turns:
            found["slices"] = described(RecordedSlices.read(folder / "logs" / "slices"))
        return found


def trained(piece: Piece, workload: str, lab: Lab, folder: Path) -> dict[str, Any]:
    spec, run = folder / "spec.toml", folder / "run"
    spec.write_text(
        SPEC.format(
            workload=workload, steps=piece.steps, trial=piece.trial,
            interface=INTERFACE, hostfile=lab.hostfile,
        )
    )  # fmt: skip
    command = lab.hosts[0].command(sys.executable, "-m", "paceline.cli", "run", spec, "--out", run)
    output_of(command, LIMIT_S)
    found = {}
    for record in load_run(RunFiles(run)):
        steps = read_steps(record)
        steady = global_steps(record, steps)
        usage = analyse_trial(record, None).usage
        found[record.trial.configuration] = {
            "step_s": steady.time_s[steady.steady].tolist(),
            "comm_s": steps.steady()["comm_s"].mean(axis=0).tolist(),
            "cpu_percent": usage.cpu_percent,
        }
    return {"trials": found}


# --- all-reduces ------------------------------------------------------------------------------


def all_reduced(lab: Lab, folder: Path) -> dict[str, Any]:
    """Return the seconds of a call by bytes, in the time of the first host."""
    out = folder / "calls.json"
    words = [
        mpirun(), "-n", 2, "--hostfile", lab.hostfile, "--map-by", "ppr:1:node",
        "--bind-to", "none", sys.executable, "-m", "mpi4py", __file__, _RANK, out,
    ]  # fmt: skip
    output_of(lab.hosts[0].command(*words), LIMIT_S)
    calls = json.loads(out.read_text())
    if not lab.record.settings.turns:
        return {"calls": {size: each["length_s"] / each["calls"] for size, each in calls.items()}}
    time.sleep(0.5)  # the scheduler writes slices at the end of a round, so the last come later
    clock = RecordedSlices.read(lab.record.slices).clocks()[lab.hosts[0].name]
    found = {}
    for size, each in calls.items():
        [length_s] = clock.lengths_s(each["started_unix_s"], [each["length_s"]])
        found[size] = length_s / each["calls"]
    return {"calls": found}


def run_rank() -> None:
    """Time calls of each size, as many as take long enough; rank 0 writes the file."""
    import numpy as np  # noqa: PLC0415
    from mpi4py import MPI  # noqa: PLC0415

    world, found = MPI.COMM_WORLD, {}
    for size in SIZES_BYTES:
        source, target = np.ones((2, size // 4), dtype=np.float32)
        world.Allreduce(source, target)
        started_s = time.perf_counter()
        world.Allreduce(source, target)
        once_s = max(world.allgather(time.perf_counter() - started_s))
        calls = max(2, min(2000, round(_CALLS_S / once_s)))
        world.Barrier()
        started_unix_s, started_s = time.time(), time.perf_counter()
        for _ in range(calls):
            world.Allreduce(source, target)
        length_s = time.perf_counter() - started_s
        found[str(size)] = {"started_unix_s": started_unix_s, "length_s": length_s, "calls": calls}
    if world.rank == 0:
        Path(sys.argv[2]).write_text(json.dumps(found))


# --- conclusions ------------------------------------------------------------------------------


def described(recorded: RecordedSlices) -> dict[str, float]:
    """Return how exact the turns were, in milliseconds: medians and 99 % of all slices."""
    slices = sorted(each for clock in recorded.clocks().values() for each in clock.slices)
    lengths = [each.length_ns / 1e6 for each in slices]
    between = [(later.start_ns - sooner.end_ns) / 1e6 for sooner, later in pairwise(slices)]
    overlap = overlap_ns(recorded.clocks().values()) / 1e6
    found = {"slices": float(len(slices)), "overlap_ms": overlap}
    for name, values in (("length_ms", lengths), ("between_ms", between)):
        found[name] = statistics.median(values)
        found[f"{name}_p99"] = statistics.quantiles(values, n=100)[98]
    return found


def values_of(mode: dict[str, Any]) -> dict[str, float]:
    """Return the median step of each trial and the speedup, or the time of each all-reduce."""
    if "calls" in mode:
        return {f"all-reduce {size}": seconds for size, seconds in mode["calls"].items()}
    steps = {name: statistics.median(each["step_s"]) for name, each in mode["trials"].items()}
    baseline, *others = steps
    return {
        **{f"step {name}": seconds for name, seconds in steps.items()},
        **{f"speedup {name}": steps[baseline] / steps[name] for name in others},
    }


def show(pair: dict[str, Any]) -> None:
    real, turns = values_of(pair["real"]), values_of(pair["turns"])
    for name, value in real.items():
        print(
            f"{pair['piece']} {name}: real {value:.4g}, turns {turns[name]:.4g}, ratio "
            f"{turns[name] / value:.3f}",
            flush=True,
        )
    print(f"{pair['piece']} {pair['turns']['slices']}", flush=True)


def concluded(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Print and return the ratios of all pieces, and whether speedups agree."""
    found: dict[str, Any] = {}
    for piece in dict.fromkeys(f"{row['piece']} {row['workload']}" for row in rows):
        pairs = [row for row in rows if f"{row['piece']} {row['workload']}" == piece]
        real, turns = ([values_of(row[mode]) for row in pairs] for mode in ("real", "turns"))
        found[piece] = {"pairs": len(pairs)}
        for name in real[0]:
            ratio = paired_ratio([each[name] for each in turns], [each[name] for each in real])
            found[piece][name] = {
                "real": median_interval([each[name] for each in real]),
                "turns": median_interval([each[name] for each in turns]),
                "ratio": ratio,
            }
            shown(f"{piece} {name}: turns over real", ratio)
            if name.startswith("speedup"):
                allowed = next((ALLOWED[link] for link in LINKS if link in piece), 0.05)
                found[piece][name]["agrees"] = abs(ratio["median"] - 1) <= allowed
    return found


if __name__ == "__main__":
    main()
