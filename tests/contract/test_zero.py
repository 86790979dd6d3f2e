"""ZeRO-1 between nodes: clipping, accumulation, AdamW, the bytes that are sent, and the records.

tests/contract/test_strategies.py has its equivalence and its checkpoints. The oracle is torch
alone.
"""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.contract.by_hand import STEPS, task_named, train_by_hand

from paceline.analysis.trial.communication import trial_communication
from paceline.analysis.trial.reading import load_trial
from paceline.measure.records.files import read_jsonl
from paceline.measure.records.layout import TrialFiles
from paceline.train.workloads.build import build_model

pytestmark = pytest.mark.contract

MESSAGE_BYTES = 0.02 * 2**20  # as in programs/factors.py
# AdamW divides by the size of the gradients, which enlarges relative differences of small ones.
TOLERANCES = {"Accumulated": 1e-4, "Adaptive": 1e-3, "Linear": 1e-4}
# transport -> ranks, nodes
SETUPS = {"gloo": (6, 3), "mpi": (4, 2)}


@pytest.fixture(scope="module", params=SETUPS)
def trained(request, run_ranks, tmp_path_factory, data):
    """Return the numbers of ranks and nodes, and the folder of what the ranks left."""
    ranks, nodes = SETUPS[request.param]
    folder = tmp_path_factory.mktemp("zero")
    save_file(data, folder / "data.safetensors")
    setups = {"zero": {"nodes": nodes, "local_strategy": "processes", "reduction": "zero-1"}}
    run_ranks(ranks, request.param, "factors", folder, json.dumps(setups), *TOLERANCES)
    return ranks, nodes, folder / "zero"


@pytest.mark.parametrize("task", TOLERANCES)
def test_weights_are_those_of_one_process(trained, data, task):
    ranks, _, folder = trained
    wanted, initial = train_by_hand(data, task), build_model(task_named(task)).state_dict()
    found = [load_file(folder / f"{task}.{rank}.safetensors") for rank in range(ranks)]
    for name, tensor in wanted.items():
        weights = found[0][f"weights/{name}"]
        moved = (tensor - initial[name]).norm()
        assert (weights - tensor).norm() < TOLERANCES[task] * moved
        assert all(torch.equal(weights, other[f"weights/{name}"]) for other in found)


@pytest.mark.parametrize("task", TOLERANCES)
def test_a_step_scatters_all_gradients_and_gathers_all_weights(trained, task):
    ranks, nodes, folder = trained
    elements = sum(parameter.numel() for parameter in build_model(task_named(task)).parameters())
    messages = 0
    for rank in range(ranks):
        rows = [*read_jsonl(folder / f"{task}.{rank}.jsonl")]
        sent = [row["payload_bytes"] for row in rows if row["operation"] == "alltoall"]
        said = json.loads((folder / f"{task}.{rank}.json").read_text())
        a_step = said["bucket_bytes"]
        assert all(size <= MESSAGE_BYTES for size in a_step)
        assert sent == 2 * STEPS * a_step  # gradients, and then weights
        assert said["sent_bytes_per_step"] == round(2 * sum(a_step) * (nodes - 1) / nodes)
        messages += sum(a_step)
    # Ranks of a node divide the gradients. Shorter shards leave a part of their row unused: a rank
    # may have a row more of a linear layer than another one.
    assert 4 * elements * nodes <= messages <= 1.4 * 4 * elements * nodes


@pytest.mark.parametrize(("task", "moments"), [("Accumulated", 1), ("Adaptive", 2)])
def test_ranks_of_all_nodes_divide_the_state_of_the_optimiser(trained, task, moments):
    ranks, _, folder = trained
    elements = sum(parameter.numel() for parameter in build_model(task_named(task)).parameters())
    found = [
        json.loads((folder / f"{task}.{rank}.json").read_text())["state_bytes"]
        for rank in range(ranks)
    ]
    assert sum(found) == moments * 4 * elements
    # linear layers are divided by rows, the rest by cache lines
    assert max(found) < 1.2 * sum(found) / ranks


def test_profile_of_a_whole_worker_has_both_exchanges_of_each_step(run_ranks, tmp_path):
    setup = {"nodes": 2, "local_strategy": "processes", "reduction": "zero-1"}
    run_ranks(4, "gloo", "training", tmp_path, json.dumps(setup))
    found = trial_communication(load_trial(TrialFiles(tmp_path)))
    assert len(found.ranks) == 4
    for rank in found.ranks:
        assert {each.operation for each in rank.bins} == {"shared_reduce", "alltoall"}
        phases = sum(seconds for seconds in rank.phases_s.values() if seconds is not None)
        assert phases == pytest.approx(rank.step_s, rel=1e-6)
        # all are exposed, although the update lies between those of a step
        operations_s = sum(each.time_s for each in rank.bins) / rank.steps
        assert rank.exposed_s == pytest.approx(operations_s, rel=0.01)
        assert rank.exposed_s <= rank.comm_s * 1.01
