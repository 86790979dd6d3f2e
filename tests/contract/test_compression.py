"""Ways to send less, under mpirun: all ranks end with the same bits, and lose what they may.

What each way loses on a single rank is in tests/unit/train/transports/compression.
"""

from __future__ import annotations

import copy
import json
from functools import cache
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support import oracle
from tests.support.models import TINY_VGG
from torch.nn.functional import cross_entropy

from paceline.measure.records.files import read_jsonl
from paceline.measure.records.layout import TrialFiles
from paceline.train.workloads.build import build_model, make_task

pytestmark = pytest.mark.contract

SEED, BATCH, STEPS = 3, 10, 20  # as in programs/less_to_send.py
ROW_GROUP_ROWS = (20, 21)
SUM_STEPS = 20  # as in programs/compression.py
# Of one step's sum, relative to its length; None where a single step may miss anything.
LARGEST_ERROR = {
    "none": 1e-6, "bf16": 2**-7, "fp16": 2**-10, "int8": 0.03, "topk": None, "terngrad": None,
    "powersgd": None,
}  # fmt: skip
KEEPS_ITS_ERRORS = ("int8", "topk", "powersgd")

POWERSGD = {"compression": {"method": "powersgd", "numbers": {"rank": 2}}}
LESS = {
    "bf16": {"compression": {"method": "bf16"}},
    "int8": {"compression": {"method": "int8"}, "buckets_in_flight": 2},
    "topk": {"compression": {"method": "topk", "numbers": {"density": 0.05}}},
    "terngrad": {"compression": {"method": "terngrad"}},
    "powersgd": POWERSGD,
}
LOCAL = {"period 4": (4, 0), "period 5 after 10": (5, 10)}


@pytest.fixture(scope="module", params=[("gloo", 3), ("mpi", 2), ("mpi", 3)], ids=str)
def sums(request, run_ranks, tmp_path_factory):
    """By method: what each rank left, and what the first said."""
    transport, ranks = request.param
    folder = tmp_path_factory.mktemp("sums")
    run_ranks(ranks, transport, "compression", folder)
    said = json.loads((folder / "said.0.json").read_text())
    return {
        method: (
            [load_file(folder / f"{method}.{r}.safetensors") for r in range(ranks)],
            said[method],
        )
        for method in LARGEST_ERROR
    }


def relative(found, true):
    return ((found - true).norm() / true.norm()).item()


@pytest.mark.parametrize("method", LARGEST_ERROR)
def test_every_rank_has_the_very_same_sum(sums, method):
    first, *others = sums[method][0]
    for step in range(SUM_STEPS):
        assert all(torch.equal(first[f"sum/{step}"], other[f"sum/{step}"]) for other in others)


@pytest.mark.parametrize("method", LARGEST_ERROR)
def test_sum_is_right_as_far_as_the_way_goes(sums, method):
    left, _ = sums[method]
    true = sum(rank["gradients"] for rank in left)
    errors = [relative(left[0][f"sum/{step}"], true) for step in range(SUM_STEPS)]
    if LARGEST_ERROR[method] is not None:
        assert max(errors) < LARGEST_ERROR[method]
    else:
        assert max(errors) > 0.1
    if method != "none":
        assert max(errors) > 1e-5


@pytest.mark.parametrize("method", KEEPS_ITS_ERRORS)
def test_what_a_step_misses_comes_with_later_ones(sums, method):
    left, _ = sums[method]
    true = sum(rank["gradients"] for rank in left)
    half = sum(left[0][f"sum/{step}"] for step in range(SUM_STEPS // 2)) / (SUM_STEPS // 2)
    whole = sum(left[0][f"sum/{step}"] for step in range(SUM_STEPS)) / SUM_STEPS
    assert relative(whole, true) < 0.75 * relative(half, true)


def test_terngrad_comes_out_right_in_the_mean(sums):
    left, _ = sums["terngrad"]
    true = sum(rank["gradients"] for rank in left)
    one = relative(left[0]["sum/0"], true)
    mean = relative(sum(left[0][f"sum/{step}"] for step in range(SUM_STEPS)) / SUM_STEPS, true)
    # 1 / sqrt(20) = 0.22 of the noise of one, and what clipping at 2.5 deviations takes away
    assert mean < 0.4 * one


def test_bytes_sent_are_those_of_the_formulas(sums):
    ranks = len(sums["none"][0])
    elements = len(sums["none"][0][0]["gradients"])
    whole = 4 * elements * 2 * (ranks - 1) / ranks
    said = {method: said["sent_bytes_per_step"] for method, (_, said) in sums.items()}
    assert {said["uncompressed_bytes_per_step"] for _, said in sums.values()} == {round(whole)}
    assert said["none"] == round(whole)
    assert said["bf16"] == said["fp16"] == pytest.approx(whole / 2, rel=0.01)
    assert whole / 4 < said["int8"] < whole / 2  # blocks of small buckets are padded
    assert said["topk"] == pytest.approx(8 * 0.1 * elements * (ranks - 1), rel=0.01)
    assert said["terngrad"] == pytest.approx((elements / 4 + 5 * 4) * (ranks - 1), rel=0.01)
    matrices = 2 * (30 + 40) + 135  # two factors of the first; (5, 27) would not shrink to half
    rest = 30 + 1 + 61
    factors = 4 * (matrices + rest) * 2 * (ranks - 1) / ranks
    assert said["powersgd"] == pytest.approx(factors, rel=0.25)


WAYS = {
    "plain": {},
    "one in flight": {"buckets_in_flight": 1},
    "gathered": {"bucket_wait_ms": 1.0, "bucket_mb": 0.05},
    **LESS,
    **{
        name: {"averaging": {"period_steps": period, "start_step": start}}
        for name, (period, start) in LOCAL.items()
    },
}
SLICES = [{}, {"compression": {"method": "int8"}}, POWERSGD]
SLICED: dict[str, dict[str, Any]] = {
    "hierarchical": {"nodes": 2, "local_strategy": "processes", "reduction": "hierarchical"},
    "threads": {"nodes": 2, "local_strategy": "threads", "thread_replicas": 2},
    "pipeline": {
        "nodes": 2, "local_strategy": "pipeline", "task": TINY_VGG,
        "memory_format": "channels_last", "pipeline": {"stages": 2, "micro_batches": 4},
    },
}  # fmt: skip
# What the same processes train one after the other, as programs/less_to_send.py takes it.
JOBS: dict[tuple[str, int], dict[str, dict[str, Any]]] = {
    ("gloo", 2): {
        "ways": {"setup": {}, "cases": [*WAYS.values()]},
        # of equal shares: the training's fifth step would have one sample
        "averaged": {
            "setup": {"steps": 4, "momentum": 0.0},
            "cases": [{}, {"averaging": {"period_steps": 1}}],
        },
    },
    ("mpi", 3): {"ways": {"setup": {}, "cases": [*WAYS.values()]}},
    ("mpi", 2): {"threads": {"setup": {**SLICED["threads"], "steps": 8}, "cases": SLICES}},
    ("gloo", 4): {
        name: {"setup": {**SLICED[name], "steps": 8}, "cases": SLICES}
        for name in ("hierarchical", "pipeline")
    },
}


@pytest.fixture(scope="module")
def run_jobs(run_ranks, tmp_path_factory, data):
    """Where programs/less_to_send.py left what it trained; each of JOBS is run once."""

    @cache
    def run(transport, ranks):
        folder = tmp_path_factory.mktemp("less")
        save_file(data, folder / "data.safetensors")
        run_ranks(ranks, transport, "less_to_send", folder, json.dumps(JOBS[transport, ranks]))
        return folder

    return run


@pytest.fixture(scope="module", params=[("gloo", 2), ("mpi", 3)], ids=str)
def trained(request, run_jobs):
    """What each rank left after training in every way, by its name."""
    transport, ranks = request.param
    folder = run_jobs(transport, ranks) / "ways"
    return {
        name: [load_file(folder / f"{number}.{rank}.safetensors") for rank in range(ranks)]
        for number, name in enumerate(WAYS)
    }


def weights_of(left):
    return torch.cat(
        [t.view(-1) for name, t in sorted(left.items()) if name.startswith("weights/")]
    )


@pytest.mark.parametrize("way", ["plain", "one in flight", "gathered", *LESS, *LOCAL])
def test_all_ranks_end_with_the_very_same_weights(trained, way):
    first, *others = trained[way]
    assert all(torch.equal(weights_of(first), weights_of(other)) for other in others)


def test_few_buckets_in_flight_change_nothing(trained):
    plain, limited = trained["plain"][0], trained["one in flight"][0]
    assert torch.equal(weights_of(plain), weights_of(limited))


def test_gathered_buckets_change_nothing_but_the_order_of_sums(trained):
    plain, gathered = trained["plain"][0], trained["gathered"][0]
    assert relative(weights_of(gathered), weights_of(plain)) < 1e-5


@pytest.mark.parametrize("way", LESS)
def test_training_that_sends_less_learns_nearly_as_much(trained, way):
    plain, less = (sum(rank["losses"] for rank in trained[name]) for name in ("plain", way))
    learned = (plain[0] - plain[15:19].mean()).item()
    assert (less[0] - less[15:19].mean()).item() > 0.5 * learned
    assert relative(weights_of(trained[way][0]), weights_of(trained["plain"][0])) > 1e-6


def local_sgd_by_hand(data, ranks, period, start, momentum=0.9, steps=STEPS):
    """All ranks' models in this process, without Paceline's strategies."""
    first = build_model(make_task("tiny", classes=3, dropout=False, seed=SEED))
    models = [first, *(copy.deepcopy(first) for _ in range(1, ranks))]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01, momentum=momentum) for m in models]
    for number in range(steps):
        _, global_ids = oracle.step_samples(ROW_GROUP_ROWS, SEED, BATCH, number)
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            ids = oracle.rank_share(global_ids, rank, ranks) if number >= start else global_ids
            if ids:
                cross_entropy(model(data["images"][ids]), data["labels"][ids]).backward()
                optimizer.step()
        if number >= start and (number - start + 1) % period == 0:
            with torch.no_grad():
                for same in zip(*(model.parameters() for model in models), strict=True):
                    mean = torch.stack(list(same)).mean(dim=0)
                    for parameter in same:
                        parameter.copy_(mean)
    return {f"weights/{name}": t for name, t in first.state_dict().items()}


@pytest.mark.parametrize("way", LOCAL)
def test_local_sgd_is_what_a_simulation_in_one_process_does(trained, data, way):
    by_hand = local_sgd_by_hand(data, len(trained[way]), *LOCAL[way])
    plain = weights_of(trained["plain"][0])
    found, wanted = weights_of(trained[way][0]), weights_of(by_hand)
    assert relative(found, wanted) < 1e-5
    assert relative(plain, wanted) > 1e-3  # which is something else than averaging gradients


def test_averaging_after_every_step_without_momentum_is_averaging_gradients(run_jobs):
    folder = run_jobs("gloo", 2) / "averaged"
    plain, averaged = (weights_of(load_file(folder / f"{n}.0.safetensors")) for n in range(2))
    assert relative(averaged, plain) < 1e-6


@pytest.mark.parametrize(
    ("transport", "ranks", "name"),
    [(*same, name) for same in JOBS for name in SLICED if name in JOBS[same]],
)
def test_slices_travel_compressed_between_nodes(run_jobs, transport, ranks, name):
    folder = run_jobs(transport, ranks) / name
    left = [
        [load_file(folder / f"{n}.{rank}.safetensors") for rank in range(ranks)]
        for n in range(len(SLICES))
    ]
    plain = weights_of(left[0][0])
    for compressed in left[1:]:
        first, *others = map(weights_of, compressed)
        assert all(torch.equal(first, other) for other in others)
        assert 1e-8 < relative(first, plain) < 0.05


def test_worker_ends_local_sgd_with_an_averaging_and_accounts_for_each(run_ranks, tmp_path):
    """Six steps: averaged after the fourth, and after the last, where a period has not ended."""
    run_ranks(2, "mpi", "training", tmp_path, json.dumps({"averaging": {"period_steps": 4}}))
    files = TrialFiles(tmp_path)
    for rank in range(2):
        rows = list(read_jsonl(files.rank(rank).steps))
        assert [row["comm_s"] > 0 for row in rows] == [False, False, False, True, False, True]
        assert [row["comm_ready_unix_s"] is None for row in rows] == [
            row["comm_s"] == 0 for row in rows
        ]
        for row in rows:
            phases = ("data_wait", "forward", "backward", "comm", "optimizer", "other")
            assert sum(row[f"{p}_s"] for p in phases) == pytest.approx(row["step_s"])
            assert all(row[f"{p}_s"] >= -1e-6 for p in phases)
    communication = json.loads(files.result.read_text())["communication"]
    assert communication["averaging"] == {"period": 4, "start_step": 0, "momentum": "local"}
    whole = communication["uncompressed_bytes_per_step"]
    # two of six steps, with what the flat array is padded by
    assert communication["sent_bytes_per_step"] == pytest.approx(whole * 2 / 6, rel=0.01)


def test_worker_says_what_it_sent_and_leaves_no_thread(run_ranks, tmp_path):
    run_ranks(2, "gloo", "training", tmp_path, json.dumps(LESS["topk"]))
    result = json.loads(TrialFiles(tmp_path).result.read_text())
    communication = result["communication"]
    assert communication["compression"]["method"] == "topk"
    # 5 % of the elements, 8 bytes each; half of what two ranks all-reduce is sent by each
    wanted = 0.05 * 2 * communication["uncompressed_bytes_per_step"]
    assert communication["sent_bytes_per_step"] == pytest.approx(wanted, rel=0.01)
