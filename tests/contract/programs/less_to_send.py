"""Run by mpirun: trains 20 steps with ways to send less, as strategies.py does.

usage: less_to_send.py TRANSPORT FOLDER SETUP_JSON CASE_JSON...

setup: what strategies.py takes, and `steps`, if there are to be others.

A case is what the trial says beside; its results are in `N.RANK.safetensors`, counted from 0.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parent))
import strategies
from ranks import make_context, make_trial

from paceline.plan.trial import Trial
from paceline.train.peers import join_peers


def main() -> None:
    torch.set_num_threads(1)
    transport, folder, setup = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    strategies.STEPS = setup.pop("steps", strategies.STEPS)
    context = make_context(folder, setup.get("nodes", 1))
    whole = make_trial(transport, context.world_size, bucket_mb=0.02, dropout=False, **setup)
    data = load_file(folder / "data.safetensors")
    peers = join_peers(context, whole)
    for number, case in enumerate(sys.argv[4:]):
        trial = Trial.model_validate({**whole.model_dump(), **json.loads(case)})
        left = strategies.train(context, trial, strategies.Case(peers, str(number)), data)
        save_file(left, folder / f"{number}.{context.rank}.safetensors")
    peers.leave(failed=False)


if __name__ == "__main__":
    main()
