"""How often `sufficient_factors = "auto"` chooses the faster option, on a grid of layers and links.

    python factor_grid.py --out results/raw/factor_grid.json        # needs root: it makes the hosts

Lab hosts with a core each. For each bandwidth, layer shape and number of samples of a rank, the
communication of one layer in a step is measured with both options, repeats interleaved:

all-reduce: the rank's own product, then the sum of its gradient with 1 MB of other gradients.
factors: both factors are gathered, then the sum of the 1 MB, then the product of all samples.

`auto` decides from the speeds that a training measures before its first step. A choice is right if
the chosen option was the faster one, or if the 95 % confidence interval of the ratio of both
includes 1. The loss is the time of the chosen option over that of the faster one.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from common import documented_parser, paired_ratio, write_results
from lab_jobs import RANK, ranks_on
from paceline.runner.lab import Lab, LabSettings

FULL = "full"
SHAPES = ("256x256", "1024x1024", "2048x1000", "4096x1024", "4096x4096", "9216x4096")
SAMPLES = (1, 4, 16, 64, 256)
BANDWIDTHS = (FULL, "10gbit", "1gbit", "100mbit")


def main() -> None:
    if sys.argv[1:2] == [RANK]:
        from factor_grid_rank import run_rank  # noqa: PLC0415  (torch and MPI)

        run_rank(sys.argv[2], Path(sys.argv[3]))
        return
    options = arguments()
    deadline_s = time.monotonic() + options.limit_s
    cases = []
    # a core for each host, as far as there are as many
    settings = LabSettings(hosts=options.hosts, slots=1, cores=options.cores)
    with Lab(settings) as lab:
        for index, bandwidth in enumerate(options.bandwidths):
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                print(f"links {bandwidth}: no time is left", file=sys.stderr)
                continue
            lab.shape(None if bandwidth == FULL else bandwidth)
            job = {
                "cases": list(itertools.product(options.shapes, options.samples)),
                "transport": options.transport,
                "repeats": options.repeats,
                "limit_s": left_s / (len(options.bandwidths) - index),
            }
            found = ranks_on(lab, __file__, job, left_s + 120)
            for case in found["cases"]:
                cases.append(judged({"bandwidth": bandwidth, **case}))
                show(cases[-1])
            print(f"links {bandwidth}: {found['left_out']} cases left out", file=sys.stderr)
    summary = summarised(cases)
    write_results(options.out, "factor_grid", {**summary, "cases": cases})


def arguments() -> argparse.Namespace:
    parser = documented_parser(__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.json")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--cores", type=int, default=1, help="of each host; 0: all hosts share all")
    parser.add_argument("--transport", choices=("gloo", "mpi4py"), default="gloo")
    parser.add_argument("--bandwidths", nargs="+", default=BANDWIDTHS, metavar="RATE")
    parser.add_argument("--shapes", nargs="+", default=SHAPES, metavar="INPUTSxOUTPUTS")
    parser.add_argument("--samples", nargs="+", type=int, default=SAMPLES, help="of each rank")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--limit-s", type=float, default=1800, help="of all links together")
    found = parser.parse_args()
    found.cores = found.cores or None
    return found


def judged(case: dict[str, Any]) -> dict[str, Any]:
    """Add the ratio of both options, and whether the choice was right."""
    reduce_s, factors_s = (statistics.median(case[name]) for name in ("all_reduce_s", "factors_s"))
    ratio = paired_ratio(case["factors_s"], case["all_reduce_s"])
    is_tie = ratio["low"] <= 1 <= ratio["high"]
    chosen_s = factors_s if case["sends_factors"] else reduce_s
    return {
        **case,
        "factors_over_all_reduce": ratio,
        "is_tie": is_tie,
        "is_right": is_tie or case["sends_factors"] == (factors_s < reduce_s),
        "loss": chosen_s / min(factors_s, reduce_s) - 1,
    }


def show(case: dict[str, Any]) -> None:
    ratio = case["factors_over_all_reduce"]
    chosen = "factors" if case["sends_factors"] else "all-reduce"
    print(
        f"{case['bandwidth']:<8} {case['shape']:<10} {case['samples']:>4} samples"
        f"  factors/all-reduce {ratio['median']:7.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}]"
        f"  predicted {case['predicted_ratio']:7.3f}  auto: {chosen:<10}"
        f" {'right' if case['is_right'] else 'WRONG':<5} loss {case['loss']:6.1%}"
    )


def summarised(cases: list[dict[str, Any]]) -> dict[str, Any]:
    """Print and return the share of right choices and the largest loss."""
    if not cases:
        raise SystemExit("factor_grid.py: no case was measured within the limit")
    right = sum(case["is_right"] for case in cases) / len(cases)
    worst = max(case["loss"] for case in cases)
    ties = sum(case["is_tie"] for case in cases)
    print(
        f"{len(cases)} cases, {ties} of them ties: auto is right in {right:.1%}, "
        f"largest loss {worst:.1%}"
    )
    return {"right_share": right, "largest_loss": worst, "ties": ties}


if __name__ == "__main__":
    main()
