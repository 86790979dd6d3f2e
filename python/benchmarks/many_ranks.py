"""Collectives and steps on 2, 4 and 8 lab hosts, compared with formulas and with SimGrid.

    python many_ranks.py --out results/raw/many_ranks.json          # needs root: it makes the hosts

Communication is real, over links of the given speed. Computation is replaced by sleeping, because
the hosts share this machine's cores. Three parts per number of hosts:

link: latency and bandwidth between pairs of hosts that all send at the same time. Formulas and
    simulations get these two figures and nothing else of the lab.
collectives: each all-reduce algorithm, and the all-gather, for several payloads. The time is that
    of the slowest rank. Repeats of all cases are interleaved.
steps: an AlexNet step, of which forward and backward pass sleep for the given times. Gradients of
    convolutions are reduced as they become ready; those of linear layers are reduced as well
    ("gradients"), or their factors are gathered ("hybrid").

Every row has the ratio of the measured time to both predictions; the goal is within 10 %.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from common import documented_parser, median_interval, write_results
from lab_jobs import RANK, ranks_on
from paceline.analysis.predict.exchange import ExchangeProfile, NodeOperation, Replay
from paceline.collectives.message_schedules import ALGORITHMS
from paceline.runner.lab import Lab, LabSettings
from simulation import contended_cost, simulate, why_not
from simulation_job import ALL_GATHER, Simulation, Topology

LIMIT_S = 1500.0
SAMPLES = 64  # of all hosts in a step
# Order of the backward pass: name, inputs and outputs of linear layers or parameters of others,
# share of the backward pass.
LAYERS = (
    ("fc8", 4096, 3, 0.0),
    ("fc7", 4096, 4096, 0.05),
    ("fc6", 9216, 4096, 0.10),
    ("conv5", None, 590_080, 0.15),
    ("conv4", None, 884_992, 0.20),
    ("conv3", None, 663_936, 0.15),
    ("conv2", None, 307_392, 0.25),
    ("conv1", None, 23_296, 0.10),
)


def main() -> None:
    if sys.argv[1:2] == [RANK]:
        from many_ranks_rank import run_rank  # noqa: PLC0415  (torch and MPI)

        run_rank(sys.argv[2], Path(sys.argv[3]))
        return
    options = arguments()
    results = []
    for hosts in options.hosts:
        job = {
            "payloads": options.payloads,
            "algorithms": [*ALGORITHMS, ALL_GATHER],
            "rounds": options.rounds,
            "steps": options.steps,
            "layers": LAYERS,
            "samples": SAMPLES // hosts,
            "forward_s": options.forward_s * 2 / hosts,
            "backward_s": options.backward_s * 2 / hosts,
            "limit_s": options.limit_s,
        }
        with Lab(LabSettings(hosts=hosts, slots=1, bandwidth=options.bandwidth)) as lab:
            measured = ranks_on(lab, __file__, job, options.limit_s)
        results.append(compared(hosts, job, measured))
    worst = worst_ratio(results)
    if math.isfinite(worst):
        print(f"largest deviation of the simulator from the lab: {worst:.1%}")
    else:
        print("not simulated: SimGrid is not installed for this Python")
    write_results(
        options.out,
        "many_ranks",
        {"bandwidth": options.bandwidth, "largest_deviation": worst, "hosts": results},
    )


def arguments() -> argparse.Namespace:
    parser = documented_parser(__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.json")
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--bandwidth", default="100mbit", help="of a link (default: 100mbit)")
    parser.add_argument(
        "--payloads", type=int, nargs="+", default=[100_000, 1_000_000, 8_000_000], help="bytes"
    )
    parser.add_argument("--rounds", type=int, default=5, help="interleaved repeats")
    parser.add_argument("--steps", type=int, default=3, help="of each kind")
    parser.add_argument("--forward-s", type=float, default=0.25, help="with two hosts")
    parser.add_argument("--backward-s", type=float, default=0.45, help="with two hosts")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="of each number of hosts")
    return parser.parse_args()


def compared(hosts: int, job: dict[str, Any], measured: dict[str, Any]) -> dict[str, Any]:
    """Print and return measured times beside both predictions."""
    link = measured["link"]
    shown_rate = link["bytes_per_s"] * 8 / 1e6
    print(f"{hosts} hosts: {link['latency_s'] * 1e6:.0f} µs, {shown_rate:.1f} Mbit/s")
    rows = [collective_row(hosts, link, case) for case in measured["collectives"]]
    rows += [step_row(hosts, link, job, name, raw) for name, raw in measured["steps"].items()]
    for row in rows:
        simulated = "" if row["simulated_s"] is None else f"{row['simulated_s'] * 1e3:9.1f}"
        ratio = "" if row["simulated_s"] is None else f"{row['measured_over_simulated']:6.2f}"
        print(
            f"  {row['operation']:<20} {row['payload_bytes'] / 1e6:6.1f} MB"
            f" {row['measured_s']['median'] * 1e3:9.1f} ms  formula {row['formula_s'] * 1e3:9.1f}"
            f"  simulated {simulated}  measured/simulated {ratio}"
        )
    return {"hosts": hosts, "link": link, "rows": rows}


def collective_row(hosts: int, link: dict[str, Any], case: dict[str, Any]) -> dict[str, Any]:
    simulation = Simulation(
        algorithm=case["algorithm"],
        ranks=hosts,
        payload_bytes=case["payload_bytes"],
        latency_s=link["latency_s"],
        bytes_per_s=link["bytes_per_s"],
    )
    in_chunks = case["algorithm"] != ALL_GATHER
    simulated_s = None
    if why_not() is None:
        [simulated_s] = simulate([replace(simulation, in_chunks=in_chunks)])
    return row_of(
        case["algorithm"], case["payload_bytes"], case["raw_s"], simulation.formula_s, simulated_s
    )


def step_row(
    hosts: int, link: dict[str, Any], job: dict[str, Any], name: str, raw_s: list[float]
) -> dict[str, Any]:
    """Predict a step as `paceline predict` does, from the messages and when they are ready."""
    compute_s = job["forward_s"] + job["backward_s"]
    profile = profile_of(job, name, compute_s)
    one = np.ones((1, 1))
    during_and_after = np.ones((2, 1, 1))  # the hosts share no processor

    def predicted_s(replay: type[Replay]) -> float:
        exposed = replay(
            profile,
            ("ring",),
            np.array([hosts]),
            np.array([float(job["samples"])]),
            compute_s * one,
            link["latency_s"] * during_and_after,
            link["bytes_per_s"] * during_and_after,
        ).exposed_s()
        return float(compute_s + exposed[0, 0])

    formula_s = predicted_s(Replay)
    simulated_s = predicted_s(_Simulated) if why_not() is None else None
    payload = sum(int(message.payload_bytes) for message in profile.messages)
    return row_of(f"step, {name}", payload, raw_s, formula_s, simulated_s)


class _Simulated(Replay):
    """Messages on one switch, as SimGrid simulates it."""

    def cost(self, algorithm: str, ranks: int) -> tuple[float, float]:
        return contended_cost(algorithm, ranks, Topology())


def profile_of(job: dict[str, Any], name: str, compute_s: float) -> ExchangeProfile:
    """Return the messages of a step in the order of their requests."""
    found = []
    left = 1.0  # share of the backward pass that follows
    inputs_of: list[tuple[float, NodeOperation]] = []
    for _, inputs, outputs, share in job["layers"]:
        left -= share
        lead = left * job["backward_s"] / compute_s
        if inputs is not None and name == "hybrid":
            # inputs are sent in the forward pass, at its end
            forward_lead = job["backward_s"] / compute_s
            inputs_of.append((forward_lead, message("allgather", inputs, forward_lead, job)))
            found.append(message("allgather", outputs, lead, job))
        else:
            elements = outputs if inputs is None else outputs * (inputs + 1)
            found.append(message("allreduce", elements, lead, job))
    ordered = [each for _, each in reversed(inputs_of)] + found
    return ExchangeProfile(messages=tuple(ordered))


def message(operation: str, elements: int, lead: float, job: dict[str, Any]) -> NodeOperation:
    samples = float(job["samples"])
    payload = 4 * elements * (samples if operation == "allgather" else 1)
    return NodeOperation(operation=operation, payload_bytes=payload, lead=lead, samples=samples)


def row_of(
    operation: str, payload: int, raw_s: list[float], formula_s: float, simulated_s: float | None
) -> dict[str, Any]:
    measured_s = statistics.median(raw_s)
    return {
        "operation": operation,
        "payload_bytes": payload,
        "measured_s": median_interval(raw_s),
        "formula_s": formula_s,
        "simulated_s": simulated_s,
        "measured_over_formula": measured_s / formula_s,
        "measured_over_simulated": None if simulated_s is None else measured_s / simulated_s,
        "raw_s": raw_s,
    }


def worst_ratio(results: list[dict[str, Any]]) -> float:
    """Return the largest deviation; not a number without SimGrid."""
    ratios = [row["measured_over_simulated"] for entry in results for row in entry["rows"]]
    known: list[float] = [abs(ratio - 1) for ratio in ratios if ratio is not None]
    return max(known, default=math.nan)


if __name__ == "__main__":
    started_s = time.monotonic()
    main()
    if sys.argv[1:2] != [RANK]:
        print(f"took {time.monotonic() - started_s:.0f} s", file=sys.stderr)
