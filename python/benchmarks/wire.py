"""All-reduce between two hosts over a link of limited speed: the mpi backend against Gloo.

    python wire.py --out results/raw/wire.json        # needs root: it makes the hosts itself

The hosts are network namespaces of this machine, their link a token bucket at both ends (`tc tbf`).
Calls of every algorithm and of Gloo take turns in the same processes; ratios are of neighbours.

The wire's limit. With two ranks everybody must send and receive the whole message once, so at R
bit/s no all-reduce of n bytes takes less than 8 n / R: 200 ms for 25 MB at 1 Gbit/s. TCP's packets
add their headers: 1448 bytes of payload in a frame that tc counts as 1514, so 209 ms. Both are
given. (On a real cable, preamble, checksum and gap make 1538 of it: 212 ms.)
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

from common import median_interval, paired_ratio, shown, write_results
from mpi_job import mpirun, output_of
from paceline.runner.lab import INTERFACE, Lab, LabSettings, why_not

SIZES_BYTES = (
    4_000, 16_000, 64_000, 256_000, 1_000_000, 4_000_000, 25_000_000, 64_000_000, 256_000_000,
)  # fmt: skip
ALGORITHMS = (
    "auto", "ring", "recursive-doubling", "rabenseifner", "hierarchical", "native", "naive",
    "parameter-server",
)  # fmt: skip
PAYLOAD_SHARE = 1448 / 1514
LIMIT_S = 1800.0
_RANK = "--rank"
_ROUNDS_BELOW_BYTES = 1_000_000  # shorter messages are timed five times as often


def main() -> None:
    if sys.argv[1:2] == [_RANK]:
        run_rank(json.loads(sys.argv[2]))
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--gigabits", type=float, default=1.0, help="per second, of the link")
    parser.add_argument("--ranks-per-host", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES_BYTES, help="bytes")
    parser.add_argument("--algorithms", nargs="+", default=ALGORITHMS)
    parser.add_argument(
        "--mca", nargs=2, action="append", default=[], metavar=("NAME", "VALUE"),
        help="a parameter of Open MPI",
    )  # fmt: skip
    arguments = parser.parse_args()
    reason = why_not()
    if reason is not None:
        parser.error(reason)
    found = run_job(arguments)
    for size, timed in found["bytes"].items():
        timed.update(concluded(int(size), timed["calls"], arguments))
    settings = {
        "gigabits_per_s": arguments.gigabits,
        "ranks_per_host": arguments.ranks_per_host,
        "mca": dict(arguments.mca),
    }
    write_results(arguments.out, "wire", {**settings, **found})


def run_job(arguments: argparse.Namespace) -> dict[str, Any]:
    """What rank 0 found: raw values by size and group, and how the groups describe themselves."""
    per_host = arguments.ranks_per_host
    asked = {
        "sizes": list(arguments.sizes),
        "algorithms": list(arguments.algorithms),
        "rounds": arguments.rounds,
    }
    with Lab(LabSettings(hosts=2, bandwidth=f"{arguments.gigabits}gbit")) as lab:
        variables = {"GLOO_SOCKET_IFNAME": INTERFACE, "PACELINE_INTERFACE": INTERFACE}
        command: list[object] = [
            mpirun(), "-n", 2 * per_host, "--bind-to", "none",
            "--host", ",".join(f"{host.address}:{per_host}" for host in lab.hosts),
            "--prtemca", "plm_ssh_agent", lab.agent,
            "--prtemca", "prte_if_include", INTERFACE,
            "--mca", "btl", "self,sm,tcp", "--mca", "btl_tcp_if_include", INTERFACE,
        ]  # fmt: skip
        for name, value in arguments.mca:
            command += ["--mca", name, value]
        for name in ("OMP_NUM_THREADS", *variables):
            command += ["-x", name]
        command += [sys.executable, "-m", "mpi4py", Path(__file__).resolve(), _RANK]
        said = output_of(lab.hosts[0].command(*command, json.dumps(asked)), LIMIT_S, **variables)
    found: dict[str, Any] = json.loads(said.splitlines()[-1])
    return found


def concluded(
    size: int, calls: dict[str, dict[str, list[float]]], arguments: argparse.Namespace
) -> dict[str, Any]:
    """Medians, ratios to Gloo, and with one rank a host shares of the wire's limit."""
    seconds = {name: timed["seconds"] for name, timed in calls.items()}
    limit_s = 8 * size / (arguments.gigabits * 1e9)
    concluded: dict[str, Any] = {
        "limit_s": limit_s,
        "limit_with_headers_s": limit_s / PAYLOAD_SHARE,
    }
    for name, values in seconds.items():
        interval = median_interval([value * 1e3 for value in values])
        shown(f"{size / 1e6:g} MB {name}", interval, "ms")
        concluded[name] = {"milliseconds": interval}
        if name != "gloo":
            ratio = paired_ratio(seconds["gloo"], values)
            concluded[name]["gloo_over_this"] = ratio
        if arguments.ranks_per_host == 1:
            share = median_interval([limit_s / value for value in values])
            concluded[name]["share_of_limit"] = share
    if "auto" in seconds:
        shown(f"{size / 1e6:g} MB Gloo / mpi", concluded["auto"]["gloo_over_this"], "x")
    if "auto" in seconds and arguments.ranks_per_host == 1:
        share = concluded["auto"]["share_of_limit"]
        shown(f"{size / 1e6:g} MB share of the wire, bits of the message", share)
        with_headers = {name: value / PAYLOAD_SHARE for name, value in share.items()}
        shown(f"{size / 1e6:g} MB share of the wire, with TCP's headers", with_headers)
    return concluded


def run_rank(asked: dict[str, Any]) -> None:
    """Rank 0 prints what it found."""
    import torch  # noqa: PLC0415  (the parent needs none of it, and must not join MPI)
    import torch.distributed as dist  # noqa: PLC0415

    from paceline.mpi import Options  # noqa: PLC0415
    from timed_groups import all_reduce, measure  # noqa: PLC0415

    torch.set_num_threads(1)
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    limit = timedelta(seconds=120)
    dist.init_process_group("mpi4py", timeout=limit)
    groups = {
        name: dist.new_group(backend="mpi4py", timeout=limit, pg_options=Options(algorithm=name))
        for name in asked["algorithms"]
    }
    described = {name: group.describe() for name, group in groups.items()}
    groups["gloo"] = dist.new_group(backend="gloo", timeout=limit)
    found = {}
    for size in asked["sizes"]:
        rounds = asked["rounds"] * (5 if size < _ROUNDS_BELOW_BYTES else 1)
        timed = measure({n: all_reduce(group, size) for n, group in groups.items()}, rounds)
        found[str(size)] = {
            "calls": {
                name: {"seconds": t.seconds, "cpu_seconds": t.cpu_seconds}
                for name, t in timed.items()
            }
        }
    if dist.get_rank() == 0:
        print(json.dumps({"describe": described, "bytes": found}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
