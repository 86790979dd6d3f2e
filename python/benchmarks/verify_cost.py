"""Time and memory that `paceline verify` takes, against the same script under torchrun alone.

    python verify_cost.py --out results/raw/verify_cost.json [--repeats 5] [--steps 12]

verified_training.py with three networks on two one-thread ranks over Gloo, interleaved. It notes
itself when each step ended, so a step has all that Paceline does in it. `verify` records the first
four steps; the first one is left out, since it also prepares the exchange. Each rank draws its own
samples; in `alexnet-shared`, without dropout, both have parts of those of one process, with which
their tensors are compared in each step. A later step only counts its rows. Seconds are those of the
whole command, which also trains in one process.
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from common import documented_parser, paired_ratio, shown, write_results
from mpi_job import environment
from verified_training import NETWORKS, RANKS

SCRIPT = Path(__file__).with_name("verified_training.py")
RECORDED = 4
_LIMIT_S = 600.0
_TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
_WAYS = {
    "torchrun": [*_TORCHRUN, "--nproc-per-node", str(RANKS)],
    "verify": [sys.executable, "-m", "paceline.cli", "verify", "-q", "--steps", str(RECORDED)],
}


def measured(way: str, network: str, steps: int, folder: Path) -> dict[str, float]:
    """Run the script once; return what its ranks have noted. Raises if the command fails."""
    folder.mkdir(parents=True)
    words = [str(SCRIPT), network, "--steps", str(steps), "--out", str(folder)]
    run = ["--out", str(folder / "run")] if way == "verify" else []
    began_s = time.monotonic()
    subprocess.run(
        [*_WAYS[way], *run, *words],
        env=environment(GLOO_SOCKET_IFNAME="lo"),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        timeout=_LIMIT_S,
        check=True,
    )
    seconds = time.monotonic() - began_s
    rows = [_rows(folder / f"{RANKS}.{rank}.jsonl") for rank in range(RANKS)]
    ends_s = [max(row["ended_unix_s"] for row in step) for step in zip(*rows, strict=True)]
    steps_s = [end - start for start, end in pairwise(ends_s)]
    return {
        "seconds": seconds,
        "recorded_step_s": statistics.median(steps_s[: RECORDED - 1]),
        "later_step_s": statistics.median(steps_s[RECORDED:]),
        "rss_peak_bytes": max(row["rss_peak_bytes"] for step in rows for row in step),
    }


def _rows(file: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def compared(network: str, steps: int, repeats: int) -> dict[str, Any]:
    """Return the values of both ways by repeat, in an order drawn anew for each, and ratios."""
    order = random.Random(1)  # noqa: S311
    raw: dict[str, list[dict[str, float]]] = {way: [] for way in _WAYS}
    with tempfile.TemporaryDirectory(prefix="verify-cost-") as folder:
        for repeat in range(repeats):
            for way in order.sample(list(_WAYS), len(_WAYS)):
                found = measured(way, network, steps, Path(folder) / f"{way}-{repeat}")
                raw[way].append(found)
                print(f"{repeat} {network} {way}: {found}", file=sys.stderr)
    ratios = {}
    for name in ("recorded_step_s", "later_step_s", "rss_peak_bytes"):
        ours, theirs = ([run[name] for run in raw[way]] for way in ("verify", "torchrun"))
        ratios[name] = paired_ratio(ours, theirs)
        shown(f"{network}, {name}, verify over torchrun", ratios[name], "x")
    seconds = {way: [run["seconds"] for run in runs] for way, runs in raw.items()}
    return {"network": network, "steps": steps, "ratio": ratios, "seconds": seconds, "raw": raw}


def main() -> None:
    parser = documented_parser(__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--only", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    arguments = parser.parse_args()
    rows = [compared(each, arguments.steps, arguments.repeats) for each in arguments.only]
    write_results(arguments.out, "verify_cost", {"networks": rows})


if __name__ == "__main__":
    main()
