"""Run by mpirun: trains 20 steps with ways to send less, as strategies.py does.

usage: less_to_send.py TRANSPORT FOLDER JOBS_JSON

jobs: by name, {"setup": what strategies.py takes, and `steps`, if there are to be others, "cases":
what trials say beside}. Results of case N, counted from 0, are in `NAME/N.RANK.safetensors`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parents[3]))
sys.path.insert(0, str(Path(__file__).parent))
import strategies
from ranks import make_context, make_trial
from tests.support.trials import changed

from paceline.train.rank.peers import join_peers


def run_job(
    transport: str, folder: Path, setup: dict[str, Any], cases: list[dict[str, Any]], data: Any
) -> None:
    """Trains the cases in a meeting of the ranks of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    context = make_context(folder, setup.get("nodes", 1))
    whole = make_trial(transport, context.world_size, bucket_mb=0.02, dropout=False, **setup)
    peers = join_peers(context, whole)
    for number, case in enumerate(cases):
        trial = changed(whole, **case)
        left, _ = strategies.train(context, trial, strategies.Case(peers, str(number)), data)
        save_file(left, folder / f"{number}.{context.rank}.safetensors")
    peers.leave(failed=False)


def main() -> None:
    torch.set_num_threads(1)
    transport, folder, jobs = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    data = load_file(folder / "data.safetensors")
    steps = 20
    for name, job in jobs.items():
        strategies.STEPS = job["setup"].pop("steps", steps)
        run_job(transport, folder / name, job["setup"], job["cases"], data)


if __name__ == "__main__":
    main()
