"""Run by mpirun: trains tasks with factors between nodes and leaves weights and traffic.

usage: factors.py TRANSPORT FOLDER SETUPS_JSON TASK…

setups: as of strategies.py. TASK: a class of factor_tasks.py. FOLDER/SETUP/TASK.RANK.safetensors
holds the weights and gradients, FOLDER/SETUP/TASK.RANK.json the description of the communication
and `state_bytes` of the optimiser, FOLDER/SETUP/TASK.RANK.jsonl the records of the communication.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parent))
from ranks import make_context, make_trial
from strategies import Case, train

from paceline.train.rank.peers import join_peers
from paceline.train.rank.spans import recording

TASKS = Path(__file__).with_name("factor_tasks.py")


def state_bytes() -> int:
    """Return the bytes of the states of all optimisers in this process, without single numbers."""
    gc.collect()
    optimizers = [o for o in gc.get_objects() if issubclass(type(o), torch.optim.Optimizer)]
    states = [values for each in optimizers for values in each.state.values()]
    tensors = [t for values in states for t in values.values() if isinstance(t, torch.Tensor)]
    return sum(tensor.nbytes for tensor in tensors if tensor.dim())


def main() -> None:
    torch.set_num_threads(1)
    transport, folder, setups = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    data = load_file(folder / "data.safetensors")
    for name, values in setups.items():
        place = folder / name
        place.mkdir(exist_ok=True)
        context = make_context(place, values["nodes"])
        trial = make_trial(transport, context.world_size, bucket_mb=0.02, **values)
        peers = join_peers(context, trial)
        for task in sys.argv[4:]:
            training = trial.training.model_copy(update={"task": f"{TASKS}:{task}"})
            own = trial.model_copy(update={"training": training})
            files = place / f"{task}.{context.rank}"
            sizes: list[int] = []
            with recording(files.with_name(f"{files.name}.jsonl")):
                left, described = train(
                    context, own, Case(peers, task), data,
                    before_end=lambda sizes=sizes: sizes.append(state_bytes()),
                )  # fmt: skip
            save_file(left, files.with_name(f"{files.name}.safetensors"))
            said = {**described, "state_bytes": sizes[0]}
            files.with_name(f"{files.name}.json").write_text(json.dumps(said))
        peers.leave(failed=False)


if __name__ == "__main__":
    main()
