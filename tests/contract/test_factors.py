"""Factors between nodes: gradient accumulation, clipping, and the bytes that are sent.

tests/contract/test_strategies.py has the equivalence of every strategy. The oracle is torch alone.
"""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.contract.by_hand import (
    BATCH,
    ROW_GROUP_ROWS,
    SEED,
    STEPS,
    task_named,
    train_by_hand,
)
from tests.support import oracle

from paceline.measure.records.files import read_jsonl
from paceline.train.workloads.build import build_model

pytestmark = pytest.mark.contract

TOLERANCE = 1e-4  # as in test_strategies.py
TASKS = ("Convolutional", "Accumulated", "Embedded", "Linear")


def nodes_of(nodes, local_strategy, **options):
    return {
        "nodes": nodes, "local_strategy": local_strategy, "sufficient_factors": "always", **options
    }  # fmt: skip


# name -> (transport, ranks, what else the trial says)
SETUPS = {
    "sequential": ("gloo", 3, nodes_of(3, "sequential")),
    "sequential-mpi": ("mpi", 2, nodes_of(2, "sequential")),
    "hierarchical": ("gloo", 4, nodes_of(2, "processes", reduction="hierarchical")),
    "threads": ("gloo", 2, nodes_of(2, "threads", thread_replicas=2)),
}


@pytest.fixture(scope="module")
def data():
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 3, (sum(ROW_GROUP_ROWS),), generator=generator)
    return {"images": torch.randn(len(labels), 3, 32, 32, generator=generator), "labels": labels}


@pytest.fixture(scope="module", params=SETUPS)
def trained(request, run_ranks, tmp_path_factory, data):
    """The setup's name, number of ranks, and the folder of what its ranks left."""
    transport, ranks, values = SETUPS[request.param]
    folder = tmp_path_factory.mktemp("factors")
    save_file(data, folder / "data.safetensors")
    run_ranks(ranks, transport, "factors", folder, json.dumps({request.param: values}), *TASKS)
    return request.param, ranks, folder / request.param


@pytest.mark.parametrize("task", TASKS)
def test_weights_are_those_of_one_process(trained, data, task):
    _, ranks, folder = trained
    wanted, initial = train_by_hand(data, task), build_model(task_named(task)).state_dict()
    found = [load_file(folder / f"{task}.{rank}.safetensors") for rank in range(ranks)]
    for name, tensor in wanted.items():
        weights = found[0][f"weights/{name}"]
        assert (weights - tensor).norm() < TOLERANCE * (tensor - initial[name]).norm()
        assert all(torch.equal(weights, other[f"weights/{name}"]) for other in found)


@pytest.mark.parametrize("task", [task for task in TASKS if task != "Embedded"])
def test_sent_bytes_equal_the_formulas(trained, task):
    setup, ranks, folder = trained
    model = build_model(task_named(task))
    linear = [m for m in model.modules() if isinstance(m, torch.nn.Linear)]
    features = sum(layer.in_features + layer.out_features for layer in linear)
    nodes = SETUPS[setup][2]["nodes"]
    owners = ranks // nodes
    workers = SETUPS[setup][2].get("thread_replicas", 1)
    batches = (oracle.step_samples(ROW_GROUP_ROWS, SEED, BATCH, step) for step in range(STEPS))
    counts = [len(sample_ids) for _, sample_ids in batches]
    rows = [-(-count // (ranks * workers)) * workers for count in counts]
    for rank in range(ranks):
        sent = [
            row["payload_bytes"]
            for row in read_jsonl(folder / f"{task}.{rank}.jsonl")
            if row["operation"] == "allgather"
        ]
        # The first ones belong to the calibration.
        assert sum(sent[-2 * len(linear) * STEPS :]) == 4 * features * sum(rows)
        said = json.loads((folder / f"{task}.{rank}.json").read_text())
        gathered = 4 * features * rows[-1] * (nodes - 1)
        others = sum(p.numel() for p in model.parameters()) - sum(
            p.numel() for layer in linear for p in layer.parameters()
        )
        # Ranks of a node divide the gradients that are summed, by cache lines.
        reduced = sum(said["bucket_bytes"])
        assert reduced == pytest.approx(4 * others / owners, abs=64)
        sent = round(2 * reduced * (nodes - 1) / nodes) + round(gathered)
        assert said["sent_bytes_per_step"] == pytest.approx(sent, abs=1)


def test_embedding_sends_indices_and_gradients_of_its_outputs(trained):
    setup, _, folder = trained
    layers = json.loads((folder / "Embedded.0.json").read_text())["sufficient_factors"]["layers"]
    by_name = {layer["layer"]: layer for layer in layers}
    if "sequential" not in setup:  # workers that share weights sum this gradient
        assert set(by_name) == {"4"}
        return
    assert set(by_name) == {"1", "4"}  # not the linear layer with several rows per sample
    nodes = SETUPS[setup][2]["nodes"]
    samples = -(-BATCH // nodes)
    assert by_name["1"]["factors"]["sent_bytes"] == samples * 12 * (8 + 4 * 8) * (nodes - 1)
    assert by_name["1"]["all_reduce"]["sent_bytes"] == pytest.approx(
        2 * 4 * 50 * 8 * (nodes - 1) / nodes
    )


def test_choice_and_speeds_are_recorded(trained):
    _, _, folder = trained
    said = json.loads((folder / "Convolutional.0.json").read_text())["sufficient_factors"]
    assert said["setting"] == "always"
    assert [layer["layer"] for layer in said["layers"]] == ["3", "5"]
    assert all(layer["sends_factors"] for layer in said["layers"])
    assert all(layer["factors"]["seconds"] > 0 for layer in said["layers"])
    assert all(speed > 0 for speed in said["speeds"].values())


@pytest.fixture(scope="module")
def own_script(run_ranks, tmp_path_factory):
    """The folder of a script that trains with DDP, and with paceline.with_factors."""
    folder = tmp_path_factory.mktemp("ddp")
    run_ranks(2, "gloo", "ddp_hybrid", folder)
    return folder


def test_ddp_script_trains_the_same_with_factors(own_script):
    ranks = [load_file(own_script / f"{rank}.safetensors") for rank in range(2)]
    names = [name.removeprefix("plain/") for name in ranks[0] if name.startswith("plain/")]
    assert len(names) == 5
    for name in names:
        plain, with_factors = ranks[0][f"plain/{name}"], ranks[0][f"hybrid/{name}"]
        torch.testing.assert_close(with_factors, plain, rtol=1e-4, atol=1e-6)
        assert torch.equal(with_factors, ranks[1][f"hybrid/{name}"])


def test_ddp_script_learns_the_choice_and_what_is_wrong(own_script):
    said = json.loads((own_script / "0.json").read_text())
    assert [layer["layer"] for layer in said["choice"]["layers"]] == ["3", "5"]
    assert said["error"].startswith(
        "sufficient factors: expected at most 4 rows of a rank in a step"
    )
