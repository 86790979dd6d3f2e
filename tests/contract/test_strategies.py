"""The same training whatever the transport and the number of ranks.

The oracle is written out with torch alone: the gradient of the mean loss over the whole batch.

Tolerance. With dropout off or on (masks belong to samples), float32 sums differ in their order
only. Measured with this net, for 2 and 3 ranks: gradients 1e-7 to 6e-7, weights after 20 steps up
to 1e-6 of the length of their update, a few times float32's 6e-8 as summation error theory has it
(Higham: Accuracy and Stability of Numerical Algorithms, section 4.2). 1e-4 leaves room for other
processors' sums; the smallest real defect that is looked for, one rank's gradient left out or
counted twice, is of the order of 1.
"""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy

from paceline.plan.schedule import Schedule
from paceline.records.files import read_jsonl
from paceline.records.layout import TrialFiles
from paceline.train.collectives import transport_names
from paceline.train.models import build_model, set_sample_keys

pytestmark = pytest.mark.contract

TOLERANCE = 1e-4
SEED, BATCH, SAMPLES, STEPS = 3, 10, 41, 20  # as in programs/ranks.py and programs/strategies.py
# Batches of 10 among 3 ranks are uneven; every fifth batch has one sample, so other ranks none.
STEP_OF_ONE_SAMPLE = 4
SETUPS = [(t, n) for t in transport_names() for n in (2, 3)]


@pytest.fixture(scope="module")
def data():
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 3, (SAMPLES,), generator=generator)
    noise = torch.randn(SAMPLES, 3, 32, 32, generator=generator)
    return {"images": noise + (labels.float() - 1).view(-1, 1, 1, 1), "labels": labels}


def train_by_hand(data, dropout):
    """What programs/strategies.py leaves, computed in one process without Paceline's loop."""
    schedule = Schedule([20, 21], SEED, BATCH, 4)
    model = build_model("tiny-alexnet", 3, dropout=dropout, seed=SEED)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    left = {}
    for number in range(STEPS):
        step = schedule.step(number)
        set_sample_keys(model, SEED, step.epoch, step.sample_ids)
        optimizer.zero_grad()
        logits = model(data["images"][step.sample_ids])
        cross_entropy(logits, data["labels"][step.sample_ids]).backward()
        if number in (0, STEP_OF_ONE_SAMPLE):
            for name, parameter in model.named_parameters():
                left[f"gradient{number}/{name}"] = parameter.grad.clone()
        optimizer.step()
    return left | {f"weights/{name}": t for name, t in model.state_dict().items()}


@pytest.fixture(scope="module")
def sequential(data):
    return {"plain": train_by_hand(data, False), "dropout": train_by_hand(data, True)}


@pytest.fixture(scope="module", params=SETUPS, ids=str)
def trained(request, run_ranks, tmp_path_factory, data):
    """What each rank left, by case."""
    transport, ranks = request.param
    folder = tmp_path_factory.mktemp("strategies")
    save_file(data, folder / "data.safetensors")
    run_ranks(ranks, transport, "strategies", folder, "plain", "dropout", "broken")
    return {
        case: [load_file(folder / f"{case}.{rank}.safetensors") for rank in range(ranks)]
        for case in ("plain", "dropout", "broken")
    }


def gradient_difference(found, wanted, step):
    """Largest difference of a tensor, relative to its length."""
    return max(
        ((found[name] - wanted[name]).norm() / wanted[name].norm()).item()
        for name in wanted
        if name.startswith(f"gradient{step}/")
    )


def weight_difference(found, wanted):
    """Largest difference of a tensor, relative to the length of its update."""
    initial = build_model("tiny-alexnet", 3, dropout=False, seed=SEED).state_dict()
    return max(
        (
            (found[f"weights/{name}"] - wanted[f"weights/{name}"]).norm()
            / (wanted[f"weights/{name}"] - tensor).norm()
        ).item()
        for name, tensor in initial.items()
    )


@pytest.mark.parametrize("case", ["plain", "dropout"])
def test_uneven_shares_give_the_sequential_gradient(trained, sequential, case):
    assert gradient_difference(trained[case][0], sequential[case], 0) < TOLERANCE


@pytest.mark.parametrize("case", ["plain", "dropout"])
def test_empty_shares_give_the_sequential_gradient(trained, sequential, case):
    found = trained[case][0]
    assert gradient_difference(found, sequential[case], STEP_OF_ONE_SAMPLE) < TOLERANCE


@pytest.mark.parametrize("case", ["plain", "dropout"])
def test_weights_after_20_steps_are_the_sequential_ones(trained, sequential, case):
    assert weight_difference(trained[case][0], sequential[case]) < TOLERANCE


@pytest.mark.parametrize("case", ["plain", "dropout"])
def test_all_ranks_end_with_the_very_same_weights(trained, case):
    first, *others = trained[case]
    names = [name for name in first if name.startswith("weights/")]
    assert all(torch.equal(first[n], other[n]) for other in others for n in names)


def test_broken_reducer_fails_the_same_check(trained, sequential):
    assert gradient_difference(trained["broken"][0], sequential["plain"], 0) > 1000 * TOLERANCE
    assert weight_difference(trained["broken"][0], sequential["plain"]) > 1000 * TOLERANCE


def test_dropout_does_something(sequential):
    assert weight_difference(sequential["dropout"], sequential["plain"]) > 1000 * TOLERANCE


@pytest.mark.parametrize("transport", transport_names())
def test_whole_worker_trains_and_leaves_nothing_behind(transport, run_ranks, tmp_path):
    run_ranks(2, transport, "training", tmp_path)
    files = TrialFiles(tmp_path)
    for step in range(6):
        ids = [list(read_jsonl(files.rank(r).ledger))[step]["sample_ids"] for r in range(2)]
        rows = [list(read_jsonl(files.rank(r).steps))[step] for r in range(2)]
        assert [len(i) for i in ids] == [row["samples"] for row in rows]
        assert sum(len(i) for i in ids) == rows[0]["global_samples"]
        for row in rows:
            phases = ("data_wait", "forward", "backward", "comm", "optimizer", "other")
            assert sum(row[f"{p}_s"] for p in phases) == pytest.approx(row["step_s"])
            assert row["comm_ready_unix_s"] >= row["started_unix_s"]
    spans = [[s["name"] for s in read_jsonl(files.rank(r).spans)] for r in range(2)]
    stages = ["imports", "rendezvous", "data_load", "model_build", "train", "bookkeeping"]
    assert spans == [stages, stages]
    environments = [json.loads(files.rank(r).environment.read_text()) for r in range(2)]
    assert len({e["initial_weights_sha256"] for e in environments}) == 1
    communication = json.loads(files.result.read_text())["communication"]
    assert communication["transport"] == transport
    parameters = json.loads(files.result.read_text())["parameters"]
    assert sum(communication["bucket_bytes"]) == 4 * parameters
    assert [(tmp_path / f"threads.{r}").read_text() for r in range(2)] == ["", ""]
