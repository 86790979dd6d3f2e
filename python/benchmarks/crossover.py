"""Bandwidth below which sufficient factors are faster than gradients, for 2 to 1,024 hosts.

    python crossover.py --out results/raw/crossover.json            # needs SimGrid

For one layer and the samples of a host: an all-reduce sends its gradient beside others, in a ring;
factors are gathered and multiplied by every host. SimGrid simulates the messages of both on a
switch, and in racks whose uplinks are oversubscribed. Both times are linear in 1 / bandwidth, so
they are equal at one bandwidth. `python/benchmarks/plots/pages.py` draws the figure.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from common import documented_parser, write_results
from paceline.plan.costs import LinearShape, all_gather, all_reduce
from simulation import contended_cost, why_not
from simulation_job import ALL_GATHER, Topology

Costs = dict[str, tuple[float, float]]  # rounds and path by operation
HOSTS = (2, 4, 8, 16, 64, 256, 1024)
SHAPE = LinearShape(inputs=4096, outputs=4096)
SAMPLES = (1, 8, 32, 128)
TOPOLOGIES = {
    "one switch": Topology(),
    "racks of 16, 4:1": Topology(rack_hosts=16, oversubscription=4.0),
}


def main() -> None:
    parser = documented_parser(__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.json")
    parser.add_argument("--latency-us", type=float, default=100.0)
    parser.add_argument("--product-gflop-s", type=float, default=60.0, help="of a host")
    parser.add_argument("--hosts", type=int, nargs="+", default=HOSTS)
    options = parser.parse_args()
    reason = why_not()
    if reason is not None:
        raise SystemExit(f"crossover.py: {reason}")
    latency_s, flop_per_s = options.latency_us * 1e-6, options.product_gflop_s * 1e9
    rows = []
    for name, topology in TOPOLOGIES.items():
        for hosts in options.hosts:
            costs: Costs = {
                "ring": contended_cost("ring", hosts, topology),
                ALL_GATHER: contended_cost(ALL_GATHER, hosts, topology),
            }
            formulas = {"ring": all_reduce("ring", hosts), ALL_GATHER: all_gather(hosts)}
            by_formula: Costs = {key: (cost.rounds, cost.path) for key, cost in formulas.items()}
            for samples in SAMPLES:
                speeds = hosts, samples, latency_s, flop_per_s
                rows.append({
                    "topology": name,
                    "hosts": hosts,
                    "samples": samples,
                    "rounds_and_path": costs,
                    "equal_bits_per_s": equal_bits_per_s(costs, *speeds),
                    "formula_equal_bits_per_s": equal_bits_per_s(by_formula, *speeds),
                })  # fmt: skip
                print(shown(rows[-1]))
    write_results(
        options.out,
        "crossover",
        {"latency_s": latency_s, "product_flop_per_s": flop_per_s, "rows": rows},
    )


def equal_bits_per_s(
    costs: dict[str, tuple[float, float]],
    hosts: int,
    samples: int,
    latency_s: float,
    flop_per_s: float,
) -> float | None:
    """Return the bandwidth at which both options take the same time; None if factors are never
    faster."""
    _, reduced_path = costs["ring"]
    gather_rounds, gather_path = costs[ALL_GATHER]
    saved_bytes = reduced_path * SHAPE.gradient_bytes - gather_path * SHAPE.factor_bytes(samples, 4)
    if saved_bytes <= 0:
        return None
    # two messages, and the product of the samples of the other hosts
    added_s = 2 * gather_rounds * latency_s + SHAPE.flop(samples * (hosts - 1)) / flop_per_s
    return 8 * saved_bytes / added_s


def shown(row: dict[str, Any]) -> str:
    rate = row["equal_bits_per_s"]
    text = "never" if rate is None else f"below {rate / 1e6:,.0f} Mbit/s"
    return f"{row['topology']:<18} {row['hosts']:>5} hosts {row['samples']:>4} samples: {text}"


if __name__ == "__main__":
    main()
