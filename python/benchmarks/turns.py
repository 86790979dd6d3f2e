"""Do lab hosts that take turns on the same cores agree with hosts that have cores of their own?

    python turns.py --list
    python turns.py --raw turns.jsonl --piece all
    python turns.py --raw turns.jsonl --conclude turns.json

Needs root and two idle cores. A piece is one training, or one program of all-reduces, while which
the hosts change every few seconds between cores of their own ("real") and turns, in rotating order:
what differs is the lab, not the process. Ratios are those of the median step of neighbouring blocks
in turns and real; a speedup agrees as far as its training and the sequential one do.

a-STRATEGY   one host of two cores, with an empty second one
b-WHAT-LINK  hosts of one core: one sequential, two with all gradients or with factors
c-slices     two hosts at 1 Gbit/s, all gradients, with slices of 1 to 20 ms
d-LINK       all-reduces of MPI between two hosts of one core, 1 KB to 25 MB
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from common import documented_parser, median_interval, paired_ratio, shown, write_results
from mpi_job import mpirun
from paceline.api import LineProgress
from paceline.base.errors import PacelineError
from paceline.collectives.host import wait_until
from paceline.measure.records.files import JsonlWriter, read_jsonl, write_text
from paceline.measure.records.layout import RunFiles
from paceline.measure.records.virtual_clock import (
    DILATION_VARIABLE,
    SLICES_VARIABLE,
    RecordedSlices,
    overlap_ns,
    together_file,
)
from paceline.plan.spec.loading import load_spec
from paceline.runner.lab import INTERFACE, Lab, LabSettings, network, turns
from paceline.runner.trials.planning import make_datasets, planned_trials
from paceline.runner.trials.run_trial import run_trial

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

REAL = "real"
LINKS = ("10gbit", "1gbit", "100mbit")
STRATEGIES = ("sequential", "intraop", "threads", "processes", "pipeline", "sharded")
SLICE_MS = LabSettings().slice_ms  # where not several are compared
SIZES_BYTES = (1_000, 10_000, 100_000, 1_000_000, 5_000_000, 25_000_000)
ALLOWED, ALLOWED_SLOW = 0.05, 0.1  # difference of a speedup; at 100 Mbit/s
START_S, END_S, CALLS_S = 120.0, 60.0, 0.25
SETTLE_S = 0.5  # not measured: processes move to other cores, and fill the caches there
FIRST_ROWS = 3  # left out
ALL = "all"
_RANK = "--rank"  # this program, as a rank of all-reduces
_TRAIN = "--train"  # and as the parent of a training

_TASK = f"{Path(__file__).with_name('tasks.py').resolve()}:Balanced"
SPEC = """
schema = 2
name = "turns"
seed = 1
repeats = 1
[[workloads]]
name = "balanced"
task = "{task}"
global_batch = 32
learning_rate = 0.001
max_steps = 10000
epochs = 10000
warmup_steps = 1
[[trials]]
launcher = "local"
local_strategy = "sequential"
{trial}
[telemetry]
enabled = false
[network]
interface = "{interface}"
[mpi]
hostfile = "{hostfile}"
[limits]
trial_s = 1200
"""
BASELINE = "# no other trial"
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
    trial: str  # empty: all-reduces
    cores: int  # of each host
    link: str = "1gbit"
    slices_ms: tuple[int, ...] = (SLICE_MS,)
    baseline: str = ""  # piece with the sequential training of the same hosts
    what: str = ""  # in the table

    @property
    def modes(self) -> list[str]:
        return [REAL, *map(str, self.slices_ms)]


def pieces() -> dict[str, Piece]:
    found = {
        f"a-{name}": Piece(
            ONE_HOST.format(name), 2, baseline="a-sequential", what=f"one host of two cores, {name}"
        )
        for name in STRATEGIES
    }
    one, two = "b-sequential", "two hosts of one core"
    found["a-sequential"], found[one] = Piece(BASELINE, 2), Piece(BASELINE, 1)
    gradients, factors = TWO_HOSTS.format("never"), TWO_HOSTS.format("auto")
    for link in LINKS:
        found[f"b-gradients-{link}"] = Piece(
            gradients, 1, link, baseline=one, what=f"{two}, gradients, {link}"
        )
        slices_ms = (1, 2, 5, 10) if link == "1gbit" else (SLICE_MS,)
        found[f"d-{link}"] = Piece("", 1, link, slices_ms=slices_ms, what=link)
    found["b-factors-100mbit"] = Piece(
        factors, 1, "100mbit", baseline=one, what=f"{two}, factors, 100mbit"
    )
    found["c-slices"] = Piece(
        gradients, 1, slices_ms=(1, 2, 5, 10, 20), baseline=one, what=f"{two}, gradients, 1gbit"
    )
    return dict(sorted(found.items()))


def main() -> None:
    if sys.argv[1:2] == [_RANK]:
        run_rank(Path(sys.argv[2]))
        return
    if sys.argv[1:2] == [_TRAIN]:
        train(Path(sys.argv[2]), Path(sys.argv[3]))
        return
    parser = documented_parser(__doc__)
    parser.add_argument("--raw", type=Path, metavar="FILE.jsonl", help="rows of all pieces")
    parser.add_argument("--piece", nargs="+", choices=[ALL, *pieces()], metavar="PIECE", default=[])
    parser.add_argument("--rounds", type=int, default=4, help="of all modes; default: 4")
    parser.add_argument("--block-s", type=float, default=6.0, help="of a real block; default: 6")
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
        started_s = time.monotonic()
        blocks = measured(pieces()[name], options.rounds, options.block_s)
        row = {"piece": name, "blocks": blocks, "took_s": time.monotonic() - started_s}
        with JsonlWriter(options.raw) as writer:
            writer.write(row)
        show(compared(name, [row]))
    if options.conclude is not None:
        rows = list(read_jsonl(options.raw))
        write_results(options.conclude, "turns", {"rows": rows, "conclusions": concluded(rows)})


# --- measuring --------------------------------------------------------------------------------


@dataclass
class Block:
    """A time in one mode."""

    mode: str
    from_unix_s: float
    until_unix_s: float
    slices: RecordedSlices | None = None


def measured(piece: Piece, rounds: int, block_s: float) -> list[dict[str, Any]]:
    """Return the durations of each block, in the time of the first host, by what lasted so long."""
    settings = LabSettings(hosts=2, cores=piece.cores, bandwidth=piece.link, turns=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        try:
            with Lab(settings, logs=folder / "logs") as lab, started(piece, lab, folder) as rows:
                # as in a run: nothing is measured while the program starts
                write_text(together_file(lab.record.slices), f"{os.getpid()}\n")
                if not wait_until(lambda: len(rows()) > FIRST_ROWS, START_S, poll_s=0.5):
                    said = (folder / "output").read_text()[-2000:]
                    raise SystemExit(f"turns.py: no row after {START_S:g} s: {said}")
                blocks = alternated(lab, piece, rounds, block_s, folder)
                events = rows()[FIRST_ROWS:]
        except PacelineError as error:
            raise SystemExit(f"turns.py: {error}") from error
    return [described(block, events) for block in blocks]


def alternated(lab: Lab, piece: Piece, rounds: int, block_s: float, folder: Path) -> list[Block]:
    blocks = []
    for number in range(rounds):
        shift = number % len(piece.modes)
        for mode in piece.modes[shift:] + piece.modes[:shift]:
            turns.stop(lab.record.name, lab.record.groups)
            record = lab.record
            if mode == REAL:
                record = replace(record, settings=replace(record.settings, turns=False))
            else:
                logs = folder / f"{number}-{mode}"
                logs.mkdir()
                settings = replace(record.settings, slice_ms=int(mode))
                record = replace(record, settings=settings, logs=str(logs))
            pin(lab, apart=mode == REAL)
            network.shape(record, piece.link)
            scheduler = None if mode == REAL else turns.start(record)
            time.sleep(SETTLE_S)
            began_s = time.time()
            time.sleep(block_s if scheduler is None else block_s * record.settings.dilation)
            block = Block(mode, began_s, time.time())
            if scheduler is not None:
                time.sleep(SETTLE_S)  # slices are written at the end of a round
                turns.stop(lab.record.name, lab.record.groups)
                scheduler.wait(END_S)
                block.slices = RecordedSlices.read(record.slices)
            blocks.append(block)
    return blocks


def pin(lab: Lab, *, apart: bool) -> None:
    """Give each host of one core its own core, or all the same; others keep theirs."""
    if lab.record.settings.cores != 1:
        return
    here = sorted(os.sched_getaffinity(0))
    for number, group in enumerate(turns.groups_of(lab.record.groups)):
        name = "tasks" if group.version == 1 else "cgroup.threads"
        for thread in (group.folder / name).read_text().split():
            with suppress(ProcessLookupError):  # it has ended
                os.sched_setaffinity(int(thread), {here[number if apart else 0]})


@contextmanager
def started(piece: Piece, lab: Lab, folder: Path) -> Iterator[Callable[[], list[dict[str, Any]]]]:
    """Start the piece's program and yield what reads its rows: name, start, length and count."""
    command, rows = training(piece, lab, folder) if piece.trial else all_reduces(lab, folder)
    # the times of the machine are recorded, and limits are not multiplied
    without = ["env", "-u", DILATION_VARIABLE, "-u", SLICES_VARIABLE]
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(
            lab.hosts[0].command(*without, *command),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield rows
        if process.poll() is not None:
            raise SystemExit(f"turns.py: it ended: {(folder / 'output').read_text()[-2000:]}")
    finally:
        turns.thaw(lab.record.groups)
        process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):  # then the lab's end kills it
            process.wait(END_S)


def training(
    piece: Piece, lab: Lab, folder: Path
) -> tuple[list[object], Callable[[], list[dict[str, Any]]]]:
    spec, run = folder / "spec.toml", folder / "run"
    text = SPEC.format(task=_TASK, trial=piece.trial, interface=INTERFACE, hostfile=lab.hostfile)
    spec.write_text(text)

    def rows() -> list[dict[str, Any]]:
        found = []
        for _, trial in RunFiles(run).trials() if run.exists() else ():
            for number, rank in trial.ranks():
                if number == 0 and rank.steps.exists():
                    found = [row["started_unix_s"] for row in read_jsonl(rank.steps)]
        return [event("step", start, end - start) for start, end in pairwise(found)]

    return [sys.executable, __file__, _TRAIN, spec, run], rows


def train(spec: Path, run: Path) -> None:
    """Run the last trial of a spec, without the baseline that a run begins with."""
    loaded = load_spec(spec)
    planned = planned_trials(loaded, make_datasets(loaded.experiment, LineProgress()))
    trial = planned.trials[-1]
    outcome = run_trial(trial, RunFiles(run).trial(trial.id))
    print(outcome.message)


def all_reduces(lab: Lab, folder: Path) -> tuple[list[object], Callable[[], list[dict[str, Any]]]]:
    out = folder / "calls.jsonl"
    words = [
        mpirun(), "-n", 2, "--hostfile", lab.hostfile, "--map-by", "ppr:1:node",
        "--bind-to", "none", sys.executable, "-m", "mpi4py", __file__, _RANK, out,
    ]  # fmt: skip
    return words, lambda: list(read_jsonl(out)) if out.exists() else []


def event(name: str, started_unix_s: float, length_s: float, count: int = 1) -> dict[str, Any]:
    return {
        "name": name, "started_unix_s": started_unix_s, "length_s": length_s, "count": count,
    }  # fmt: skip


def run_rank(out: Path) -> None:
    """Time calls of one size after the other, until SIGTERM; rank 0 writes the file."""
    from mpi4py import MPI  # noqa: PLC0415

    world = MPI.COMM_WORLD
    buffers = [np.ones((2, size // 4), dtype=np.float32) for size in SIZES_BYTES]
    writer = JsonlWriter(out) if world.rank == 0 else None
    while True:
        for size, (source, target) in zip(SIZES_BYTES, buffers, strict=True):
            world.Allreduce(source, target)
            started_s = time.perf_counter()
            world.Allreduce(source, target)
            once_s = max(world.allgather(time.perf_counter() - started_s))
            count = max(2, min(2000, round(CALLS_S / once_s)))
            world.Barrier()
            started_unix_s, started_s = time.time(), time.perf_counter()
            for _ in range(count):
                world.Allreduce(source, target)
            length_s = time.perf_counter() - started_s
            if writer is not None:
                writer.write(event(f"all-reduce {size}", started_unix_s, length_s, count))


# --- conclusions ------------------------------------------------------------------------------


def described(block: Block, events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the mode of a block, the durations of what lies in it, and how exact turns were."""
    lengths: dict[str, list[float]] = defaultdict(list)
    clock = None
    if block.slices is not None:
        clock = block.slices.clocks()[block.slices.hosts[0]]
    for each in events:
        start_s, length_s = each["started_unix_s"], each["length_s"]
        if block.from_unix_s <= start_s and start_s + length_s <= block.until_unix_s:
            if clock is not None:
                [length_s] = clock.lengths_s(start_s, [length_s])
            lengths[each["name"]].append(length_s / each["count"])
    exact = {} if block.slices is None else {"slices": exactness(block.slices)}
    return {"mode": block.mode, "length_s": dict(lengths), **exact}


def exactness(recorded: RecordedSlices) -> dict[str, float]:
    """Return medians and 99 % of all slices and of the times between them, in milliseconds."""
    slices = sorted(each for clock in recorded.clocks().values() for each in clock.slices)
    lengths = [each.length_ns / 1e6 for each in slices]
    between = [(later.start_ns - sooner.end_ns) / 1e6 for sooner, later in pairwise(slices)]
    overlap = overlap_ns(recorded.clocks().values()) / 1e6
    found = {"slices": float(len(slices)), "overlap_ms": overlap}
    for name, values in (("length_ms", lengths), ("between_ms", between)):
        found[name] = statistics.median(values)
        found[f"{name}_p99"] = statistics.quantiles(values, n=100)[98]
    return found


def ratios(rows: Sequence[dict[str, Any]], mode: str, name: str) -> tuple[list[float], list[float]]:
    """Return the medians in the mode and beside it in `real`, for each round with both."""
    found: dict[str, list[float | None]] = {mode: [], REAL: []}
    for row in rows:
        for block in row["blocks"]:
            if block["mode"] in found:
                values = block["length_s"].get(name)
                found[block["mode"]].append(statistics.median(values) if values else None)
    both = [(a, b) for a, b in zip(found[mode], found[REAL], strict=True) if a and b]
    return [a for a, _ in both], [b for _, b in both]


def compared(piece: str, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return by quantity and slice the medians of a piece in turns and real, and their ratio."""
    blocks = [block for row in rows for block in row["blocks"]]
    names = dict.fromkeys(name for block in blocks for name in block["length_s"])
    found = []
    for mode in dict.fromkeys(block["mode"] for block in blocks if block["mode"] != REAL):
        for name in names:
            ours, theirs = ratios(rows, mode, name)
            if ours:
                medians = {"turns_s": median_interval(ours), "real_s": median_interval(theirs)}
                found.append(
                    {
                        "piece": piece, "quantity": name, "slice_ms": int(mode), **medians,
                        "ratio": paired_ratio(ours, theirs), "pairs": len(ours),
                    }
                )  # fmt: skip
    return found


def speedup_ratio(ours: Sequence[float], baseline: Sequence[float]) -> dict[str, float]:
    """Return the ratio of a speedup in turns to the real one, with a 95 % bootstrap interval.

    ours, baseline: ratios of a step in turns to a real one, by pair of blocks.
    """
    generator = np.random.default_rng(1)
    draws = [
        np.median(generator.choice(np.asarray(values), size=(2000, len(values))), axis=1)
        for values in (baseline, ours)
    ]
    low, high = np.percentile(draws[0] / draws[1], [2.5, 97.5])
    median = statistics.median(baseline) / statistics.median(ours)
    return {"median": median, "low": float(low), "high": float(high)}


def concluded(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Print and return the ratios of all pieces, and whether speedups agree."""
    by_piece: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        by_piece[row["piece"]].append(row)
    found = []
    for name, own in sorted(by_piece.items()):
        piece = pieces()[name]
        found += [{**row, "what": piece.what} for row in compared(name, own)]
        for mode in piece.modes[1:] if piece.baseline in by_piece else ():
            baseline = ratio_of(by_piece[piece.baseline], str(SLICE_MS))
            ratio = speedup_ratio(ratio_of(own, mode), baseline)
            allowed = ALLOWED_SLOW if piece.link == "100mbit" else ALLOWED
            row = {"piece": name, "quantity": "speedup", "slice_ms": int(mode), "ratio": ratio}
            row["what"] = piece.what
            found.append({**row, "verdict": verdict(ratio, allowed)})
    show(found)
    return [{"id": f"{r['piece']}.{r['slice_ms']}.{r['quantity']}", **r} for r in found]


def verdict(ratio: dict[str, float], allowed: float) -> str:
    """Return whether a ratio is 1 within what is allowed, as far as its interval decides it."""
    least, most = 1 - allowed, 1 + allowed
    if least <= ratio["low"] and ratio["high"] <= most:
        return "agrees"
    return "differs" if ratio["low"] > most or ratio["high"] < least else "undecided"


def ratio_of(rows: Sequence[dict[str, Any]], mode: str) -> list[float]:
    return [a / b for a, b in zip(*ratios(rows, mode, "step"), strict=True)]


def show(found: Sequence[dict[str, Any]]) -> None:
    for row in found:
        name = f"{row['piece']} {row['quantity']}, {row['slice_ms']} ms: turns over real"
        shown(name, row["ratio"], row.get("verdict", ""))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
