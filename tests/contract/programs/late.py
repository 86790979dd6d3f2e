"""Run by mpirun with two ranks: rank 1 never comes to a collective; rank 0 leaves what it saw.

usage: late.py TRANSPORT FOLDER LIMIT_S [factors]

The collective is an all-reduce, or the exchange of a layer's factors.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
from ranks import make_context, make_trial

from paceline.base.errors import PacelineError
from paceline.plan.costs import LinearShape
from paceline.train.rank.peers import join_peers
from paceline.train.strategies.reduction.factor_exchange import FactorExchange, open_group


def exchange_factors(group: dist.ProcessGroup | None) -> None:
    exchange = FactorExchange()
    exchange.open({"fc": LinearShape(inputs=3, outputs=2)}, 4, torch.float32, group)
    exchange.begin(4)
    exchange.keep_inputs("fc", torch.ones(4, 3))
    exchange.keep_gradients("fc", torch.ones(4, 2))
    exchange.wait("fc")


def main() -> None:
    torch.set_num_threads(1)
    transport, folder, limit_s = sys.argv[1], Path(sys.argv[2]), float(sys.argv[3])
    context = make_context(folder)
    peers = join_peers(context, make_trial(transport, 2, collective_s=limit_s))
    group = open_group(limit_s)
    file = folder / "outcome.json"
    if context.rank == 1:
        give_up = time.monotonic() + 10 * limit_s
        while not file.exists() and time.monotonic() < give_up:
            time.sleep(0.05)
        os._exit(0)
    started = time.monotonic()
    try:
        if "factors" in sys.argv:
            exchange_factors(group)
        else:
            dist.all_reduce(torch.ones(10))
    except (RuntimeError, PacelineError) as error:
        waited_s = time.monotonic() - started
        meaning = peers.explain(error)
        started = time.monotonic()
        peers.leave(failed=True)
        outcome = {
            "waited_s": waited_s,
            "leaving_s": time.monotonic() - started,
            "kind": type(meaning).__name__,
            "message": str(meaning),
        }
        part = folder / "part"
        part.write_text(json.dumps(outcome))
        part.rename(file)
    os._exit(0)  # MPI's own end would wait for rank 1


main()
