"""The same training whatever the strategy, the transport and the number of ranks: one body for all.

The oracle is written out with torch alone: the gradient of the mean loss over the whole batch.

Tolerance. With dropout off or on (masks belong to samples), float32 sums differ in their order
only. Measured with these nets: gradients 1e-7 to 6e-7, weights after 20 steps up to 1e-6 of the
length of their update, a few times float32's 6e-8 as summation error theory has it (Higham:
Accuracy and Stability of Numerical Algorithms, section 4.2). 1e-4 leaves room for other
processors' sums; the smallest real defect that is looked for, one replica's gradient left out or
counted twice, is of the order of 1.

With bf16 the oracle runs under autocast, too. Its activations have 8 bits, so a sum that is rounded
the other way moves a result by 2**-8 = 4e-3; over 20 steps such differences grow (measured: 0.003
and 0.03 to 0.05; bf16 itself is 0.19 and 0.065 away from float32). See BF16.
"""

from __future__ import annotations

import json
from functools import cache

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support import oracle
from tests.support.models import TINY_VGG
from torch.nn.functional import cross_entropy

from paceline.measure.records.documents import CheckpointFolder
from paceline.measure.records.files import read_jsonl
from paceline.measure.records.layout import TrialFiles
from paceline.train.training.state import RankState
from paceline.train.training.state_files import Position, StateFiles, write_state
from paceline.train.training.task import put_in_memory_format
from paceline.train.workloads.build import build_model, make_task

pytestmark = pytest.mark.contract

TOLERANCE = 1e-4
BF16 = {"gradient": 0.02, "weights": 0.15}
SEED, BATCH, STEPS = 3, 10, 7  # as in programs/ranks.py and programs/strategies.py
ROW_GROUP_ROWS = (20, 21)
# Batches of 10 among 3 replicas are uneven; every fifth has one sample, so other replicas none.
STEP_OF_ONE_SAMPLE = 4
CASES = {
    "alexnet": ("tiny", False, "fp32", "contiguous"),
    "alexnet-dropout": ("tiny", True, "fp32", "contiguous"),
    "channels_last": (TINY_VGG, False, "fp32", "channels_last"),
    "checkpointed": (TINY_VGG, True, "fp32", "contiguous"),
    "bf16": ("tiny", False, "bf16", "contiguous"),
}
SAVED_AFTER = 5
SAVED, GIVEN = ("bf16", "channels_last"), "channels_last"  # as in programs/strategies.py
EXACT = [case for case in CASES if case != "bf16"]


def pipeline(stages, micro_batches, schedule="1f1b", **split_points):
    return {"stages": stages, "micro_batches": micro_batches, "schedule": schedule, **split_points}


def on_node(local_strategy, **options):
    return {"local_strategy": local_strategy, **options}


def two_nodes(local_strategy, **options):
    return {"nodes": 2, "local_strategy": local_strategy, **options}


HIERARCHICAL = two_nodes("processes", reduction="hierarchical")
ZERO = two_nodes("processes", reduction="zero-1")
FACTORS = {"sufficient_factors": "always"}
# name -> (transport, ranks, what else the trial says)
SETUPS = {
    "sequential": ("none", 1, on_node("sequential")),
    "threads-2": ("none", 1, on_node("threads", thread_replicas=2)),
    "threads-3": ("none", 1, on_node("threads", thread_replicas=3)),
    "processes-gloo-3": ("gloo", 3, on_node("processes")),
    "processes-mpi-2": ("mpi", 2, on_node("processes")),
    "processes-shared-3": ("shared", 3, on_node("processes")),
    "sharded-gloo-3": ("gloo", 3, on_node("sharded")),
    "sharded-mpi-2": ("mpi", 2, on_node("sharded")),
    "sharded-paceline-3": ("paceline", 3, on_node("sharded")),
    "parameter-server-gloo-2": ("gloo", 2, on_node("parameter-server")),
    "pipeline-1f1b-2": ("shared", 2, on_node("pipeline", pipeline=pipeline(2, 4))),
    "pipeline-gpipe-3": (
        "shared", 3, on_node("pipeline", pipeline=pipeline(3, 3, "gpipe", balance="size")),
    ),
    "pipeline-split_points-2": (
        "shared", 2,
        on_node("pipeline", pipeline=pipeline(2, 10, balance=None, split_points=(5,))),
    ),
    "hybrid-2x2": ("shared", 4, on_node("hybrid", pipeline=pipeline(2, 2))),
    "two-nodes-sequential": ("gloo", 2, two_nodes("sequential")),
    "two-nodes-sequential-factors": ("gloo", 2, two_nodes("sequential", **FACTORS)),
    "two-nodes-sequential-factors-mpi": ("mpi", 2, two_nodes("sequential", **FACTORS)),
    "two-nodes-threads-2": ("mpi", 2, two_nodes("threads", thread_replicas=2)),
    "two-nodes-processes-2-hierarchical": ("gloo", 4, HIERARCHICAL),
    "two-nodes-processes-2-hierarchical-mpi": ("mpi", 4, HIERARCHICAL),
    "two-nodes-processes-2-zero": ("gloo", 4, ZERO),
    "two-nodes-processes-2-zero-mpi": ("mpi", 4, ZERO),
    "two-nodes-processes-2-flat": ("gloo", 4, two_nodes("processes", reduction="flat")),
    "two-nodes-threads-2-factors": ("mpi", 2, two_nodes("threads", thread_replicas=2, **FACTORS)),
    "two-nodes-processes-2-hierarchical-factors": ("gloo", 4, {**HIERARCHICAL, **FACTORS}),
    "two-nodes-pipeline-2": ("mpi", 4, two_nodes("pipeline", pipeline=pipeline(2, 4))),
    "two-nodes-pipeline-2-factors": (
        "gloo", 4, two_nodes("pipeline", pipeline=pipeline(2, 4), **FACTORS),
    ),
    "two-nodes-hybrid-2x2-factors": (
        "gloo", 8, two_nodes("hybrid", pipeline=pipeline(2, 2), **FACTORS),
    ),
}  # fmt: skip


def global_batches(data):
    return oracle.global_batches(ROW_GROUP_ROWS, SEED, BATCH, STEPS, data["images"], data["labels"])


def train_by_hand(data, model_name, dropout, precision, memory_format, saved=None):
    """What programs/strategies.py leaves, computed in one process without Paceline's loop.

    saved: gets the state after SAVED_AFTER steps, as torch itself names it.
    """
    model = build_model(make_task(model_name, classes=3, dropout=dropout, seed=SEED))
    put_in_memory_format(model, memory_format)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def save(number):
        if number + 1 != SAVED_AFTER or saved is None:
            return
        for name, parameter in model.named_parameters():
            momentum = optimizer.state[parameter]["momentum_buffer"]
            saved[f"weights/{name}"] = parameter.detach().clone()
            saved[f"optimizer/{name}/momentum_buffer"] = momentum.clone()

    gradients = oracle.train_alone(
        model, global_batches(data), optimizer, seed=SEED, precision=precision, after_step=save
    )
    left = {
        f"gradient{number}/{name}": gradient
        for number in (0, STEP_OF_ONE_SAMPLE)
        for name, gradient in gradients[number].items()
    }
    return left | {f"weights/{name}": t for name, t in model.state_dict().items()}


@pytest.fixture(scope="module")
def sequential(data):
    return {case: train_by_hand(data, *values) for case, values in CASES.items()}


@pytest.fixture(scope="module")
def half_way(data):
    """The state of the case that continues from a given one, computed by hand."""
    saved = {}
    train_by_hand(data, *CASES[GIVEN], saved=saved)
    return saved


def write_given(state, folder):
    own = RankState(values={f"rates/{n[8:]}": 0.01 for n in state if n.startswith("weights/")})
    for name, tensor in state.items():
        own.add_whole(name, tensor)
    position = Position(steps=SAVED_AFTER, task_sha256="", replicas=1)
    CheckpointFolder(folder).write(
        SAVED_AFTER, 0, 1, lambda file: list(write_state(file, own, position))
    )


@pytest.fixture(scope="module")
def train_setup(run_ranks, tmp_path_factory, data, half_way):
    """Where programs/strategies.py left what it found in a setup, with those that can share its
    processes."""

    @cache  # not if it fails: each test shall show why
    def train(transport, ranks):
        folder = tmp_path_factory.mktemp("strategies")
        save_file(data, folder / "data.safetensors")
        write_given(half_way, folder / f"{GIVEN}.given")
        same = [transport, ranks]
        setups = {name: setup for name, (*one, setup) in SETUPS.items() if one == same}
        cases = [*CASES, "broken"]
        run_ranks(ranks, transport, "strategies", folder, json.dumps(setups), *cases)
        return folder

    return train


@pytest.fixture(scope="module", params=SETUPS)
def trained(request, train_setup):
    """What each rank left, by case."""
    transport, ranks, _ = SETUPS[request.param]
    folder = train_setup(transport, ranks)
    own = folder / request.param
    resumed = [f"{case}.from_saved" for case in SAVED] + [f"{GIVEN}.from_given"]
    places = {case: own / case for case in [*CASES, *resumed]}
    places["broken"] = folder / "broken" / request.param / "broken"
    found = {
        case: [load_file(f"{place}.{rank}.safetensors") for rank in range(ranks)]
        for case, place in places.items()
    }
    return found | {"states": {case: own / f"{case}.saved" for case in SAVED}}


def gradient_difference(found, wanted, step):
    """Largest difference of a tensor, relative to its length."""
    return max(
        ((found[name] - wanted[name]).norm() / wanted[name].norm()).item()
        for name in wanted
        if name.startswith(f"gradient{step}/")
    )


def weight_difference(found, wanted, model_name):
    """Largest difference of a tensor, relative to the length of its update."""
    initial = build_model(make_task(model_name, classes=3, dropout=False, seed=SEED)).state_dict()
    return max(
        (
            (found[f"weights/{name}"] - wanted[f"weights/{name}"]).norm()
            / (wanted[f"weights/{name}"] - tensor).norm()
        ).item()
        for name, tensor in initial.items()
    )


@pytest.mark.parametrize("case", EXACT)
def test_uneven_shares_give_the_sequential_gradient(trained, sequential, case):
    assert gradient_difference(trained[case][0], sequential[case], 0) < TOLERANCE


@pytest.mark.parametrize("case", EXACT)
def test_empty_shares_give_the_sequential_gradient(trained, sequential, case):
    found = trained[case][0]
    assert gradient_difference(found, sequential[case], STEP_OF_ONE_SAMPLE) < TOLERANCE


@pytest.mark.parametrize("case", EXACT)
def test_weights_after_two_epochs_are_the_sequential_ones(trained, sequential, case):
    assert weight_difference(trained[case][0], sequential[case], CASES[case][0]) < TOLERANCE


def test_bf16_gives_the_sequential_bf16_run_within_its_own_tolerance(trained, sequential):
    found, wanted = trained["bf16"][0], sequential["bf16"]
    assert gradient_difference(found, wanted, 0) < BF16["gradient"]
    assert weight_difference(found, wanted, CASES["bf16"][0]) < BF16["weights"]


@pytest.mark.parametrize("case", CASES)
def test_all_ranks_end_with_the_very_same_weights(trained, case):
    first, *others = trained[case]
    names = [name for name in first if name.startswith("weights/")]
    model = build_model(make_task(CASES[case][0], classes=3))
    assert len(names) == len(model.state_dict())
    assert all(torch.equal(first[n], other[n]) for other in others for n in names)


def test_losses_of_all_ranks_add_up_to_the_sequential_loss(trained, data):
    model = build_model(make_task("tiny", classes=3, dropout=False, seed=SEED))
    first = next(iter(global_batches(data)))
    wanted = cross_entropy(model(first.inputs), first.targets, reduction="sum")
    found = sum(rank["losses"][0].item() for rank in trained["alexnet"])
    assert found == pytest.approx(wanted.item(), rel=1e-5)


def test_fault_in_the_averaging_fails_the_same_check(request, trained, sequential):
    if request.node.callspec.params["trained"] == "sequential":
        pytest.skip("one replica, one process: there is no averaging")
    found, wanted = trained["broken"][0], sequential["alexnet"]
    assert gradient_difference(found, wanted, 0) > 1000 * TOLERANCE
    assert weight_difference(found, wanted, "tiny") > 1000 * TOLERANCE


@pytest.mark.parametrize("case", SAVED)
def test_training_that_continues_in_the_same_layout_ends_with_equal_weights(request, trained, case):
    transport, ranks, _ = SETUPS[request.node.callspec.params["trained"]]
    resumed, whole = trained[f"{case}.from_saved"], trained[case]
    if ranks > 2 and transport != "shared":
        # DDP changes its buckets after the first step, and with them the order of sums of three.
        model, tolerance = CASES[case][0], BF16["weights"] if case == "bf16" else TOLERANCE
        assert weight_difference(resumed[0], whole[0], model) < tolerance
        return
    for rank, (ours, theirs) in enumerate(zip(resumed, whole, strict=True)):
        assert torch.equal(ours["losses"], theirs["losses"][SAVED_AFTER:]), rank
        assert all(torch.equal(ours[n], t) for n, t in theirs.items() if n.startswith("weights/"))


def test_saved_state_has_the_sequential_weights_and_momentum(trained, half_way):
    saved = StateFiles(CheckpointFolder(trained["states"][GIVEN]).complete()[0])
    for name, wanted in half_way.items():
        assert (saved.tensor(name) - wanted).norm() / wanted.norm() < TOLERANCE, name


@pytest.mark.parametrize("trained", [name for name in SETUPS if "zero" in name], indirect=True)
def test_four_ranks_of_zero_have_a_quarter_of_the_state_each(trained):
    checkpoint = CheckpointFolder(trained["states"][GIVEN]).complete()[0]
    files = [load_file(checkpoint.part(rank)) for rank in range(checkpoint.ranks)]
    model = build_model(make_task(CASES[GIVEN][0], classes=3))
    elements = sum(parameter.numel() for parameter in model.parameters())
    for file in files:
        own = sum(tensor.numel() for tensor in file.values() if tensor.dtype == torch.float32)
        # weights and momentum; linear layers are divided by rows, the others by cache lines
        assert own == pytest.approx(2 * elements / 4, rel=0.15)


def test_training_continues_from_the_state_of_another_layout(trained, sequential):
    found = trained[f"{GIVEN}.from_given"][0]
    assert weight_difference(found, sequential[GIVEN], CASES[GIVEN][0]) < TOLERANCE


def test_dropout_does_something(sequential):
    difference = weight_difference(sequential["alexnet-dropout"], sequential["alexnet"], "tiny")
    assert difference > 1000 * TOLERANCE


def test_bf16_does_something(sequential):
    difference = weight_difference(sequential["bf16"], sequential["alexnet"], "tiny")
    assert difference > 10 * TOLERANCE


def test_whole_worker_of_a_sharded_model_leaves_the_records_of_one_that_is_not(run_ranks, tmp_path):
    folders = {name: tmp_path / name for name in ("processes", "sharded")}
    for name, folder in folders.items():
        folder.mkdir()
        run_ranks(2, "gloo", "training", folder, json.dumps({"local_strategy": name}))
    plain, sharded = (TrialFiles(folder) for folder in folders.values())
    environments = [json.loads(f.rank(1).environment.read_text()) for f in (plain, sharded)]
    assert len({e["initial_weights_sha256"] for e in environments}) == 1
    for theirs, ours in ((plain.gradient, sharded.gradient), (plain.weights, sharded.weights)):
        wanted, found = load_file(theirs), load_file(ours)
        assert wanted.keys() == found.keys()
        for name, tensor in wanted.items():
            assert (found[name] - tensor).norm() / tensor.norm() < TOLERANCE, name
    results = [json.loads(f.result.read_text()) for f in (plain, sharded)]
    assert results[1]["update_l2"] == pytest.approx(results[0]["update_l2"], rel=1e-3)
    assert sum(results[1]["communication"]["unit_bytes"]) == 4 * results[1]["parameters"]
    steps = list(read_jsonl(sharded.rank(0).steps))
    assert all(0 < row["pass_comm_s"] < row["step_s"] for row in steps)
    operations = {row["operation"] for row in read_jsonl(sharded.rank(0).communication)}
    assert {"allgather", "reduce_scatter"} <= operations


@pytest.mark.parametrize("transport", ["gloo", "mpi", "shared"])
def test_whole_worker_trains_and_leaves_nothing_behind(transport, run_ranks, tmp_path):
    run_ranks(2, transport, "training", tmp_path)
    files = TrialFiles(tmp_path)
    for step in range(6):
        ids = [list(read_jsonl(files.rank(r).sample_log))[step]["sample_ids"] for r in range(2)]
        rows = [list(read_jsonl(files.rank(r).steps))[step] for r in range(2)]
        assert [len(i) for i in ids] == [row["samples"] for row in rows]
        assert sum(len(i) for i in ids) == rows[0]["global_samples"]
        for row in rows:
            phases = ("data_wait", "forward", "backward", "comm", "optimizer", "other")
            assert sum(row[f"{p}_s"] for p in phases) == pytest.approx(row["step_s"])
            assert row["comm_ready_unix_s"] >= row["started_unix_s"]
    spans = [[s["name"] for s in read_jsonl(files.rank(r).spans)] for r in range(2)]
    stages = ["imports", "rendezvous", "data_load", "model_build", "train", "replay", "bookkeeping"]
    assert spans == [stages, stages]
    environments = [json.loads(files.rank(r).environment.read_text()) for r in range(2)]
    assert len({e["initial_weights_sha256"] for e in environments}) == 1
    communication = json.loads(files.result.read_text())["communication"]
    assert communication["transport"] == transport
    parameters = json.loads(files.result.read_text())["parameters"]
    sent = "shard_bytes" if transport == "shared" else "bucket_bytes"
    assert sum(communication[sent]) == 4 * parameters
    assert [(tmp_path / f"threads.{r}").read_text() for r in range(2)] == ["", ""]
