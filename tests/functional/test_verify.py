"""`paceline verify` on known bugs of parallel training, on their twins, and on plain DDP."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tests.functional.cli_runs import cli_in

pytestmark = [pytest.mark.functional, pytest.mark.timeout(400)]

ROOT = Path(__file__).parents[2]
PAIRS = ROOT / "python/benchmarks/pairs"
FLAT = Path(__file__).parent / "programs/flat_parameters.py"
STATEMENTS = FLAT.with_name("statements.py")
CLASSES = FLAT.with_name("divided_classes.py")
DDP = ROOT / "examples/scripts/ddp.py"
LAYOUTS = DDP.with_name("layouts.py")


@pytest.fixture
def paceline(cache, forks, tmp_path):
    return cli_in(cache, tmp_path, forks)


def verified(paceline, *words, launcher="local"):
    """Return the exit code and the layouts of one verification; `local` starts ranks at once."""
    options = ("--json", "-q", "--out", "run", "--launcher", launcher)
    finished = paceline.main("verify", *options, *words)
    assert finished.stdout, finished.stderr
    return finished.returncode, json.loads(finished.stdout)["layouts"]


def trained_with_roundings(folder):
    return (folder / "run/trials/reference-rounded/outcome.json").exists()


# Other bugs: python/benchmarks/verify_bugs.py
def test_a_bug_is_found_with_its_first_step_and_cause(paceline, tmp_path):
    code, [layout] = verified(paceline, PAIRS / "exchange.py", "--bug", "late-drift")
    found = layout["finding"]
    assert (code, found["passed"], found["step"]) == (9, False, 2)
    assert "was not exchanged" in found["reason"]
    assert trained_with_roundings(tmp_path)


def test_a_bug_is_found_beside_its_corrected_twin(paceline):
    words = ("--vary=--fixed=no,yes", PAIRS / "sample_weights.py", "--bug", "token-mean")
    code, [wrong, twin] = verified(paceline, *words)
    found = wrong["finding"]
    assert (code, found["passed"], found["step"]) == (9, False, 0)
    assert "not the gradient of the loss at head" in found["reason"]
    assert twin["finding"]["passed"] is True, twin


@pytest.mark.parametrize(
    ("script", "bug", "words"),
    [
        ("pipeline", "not-divided", "gradients of 4 accumulated passes were not divided"),
        ("sharding", "other-owner", "before the next step the old values are back"),
        ("sharding", "sum-of-shards", "gradients are summed over 2 ranks"),
        ("data", "one-batch-ahead", "rank 1 trains on rows of step 2 of one process"),
        ("buffers", "centre", "the buffer Centred.centre of rank 1 differs"),
        ("accumulation", "emptied-early", "1 of its 2 backward passes"),
        ("tensor_parallel", "gathered-columns", "that of 0.weight was summed over 2 ranks"),
    ],
)
def test_bugs_that_ranks_or_rows_show_are_found_beside_their_twins(paceline, script, bug, words):
    options = ("--vary=--fixed=no,yes", PAIRS / f"{script}.py", "--bug", bug)
    code, [wrong, twin] = verified(paceline, *options)
    cause = wrong["shown"]["findings"][0]
    assert (code, wrong["shown"]["statement"], words in cause["reason"]) == (9, 5, True), wrong
    assert twin["shown"]["statement"] == 1, twin


@pytest.mark.parametrize(
    ("bug", "code", "statement", "words"),
    [
        ("meta-learning", 0, 3, "first module that computes another output"),
        ("joined-by-context", 7, 4, "ranks may have different numbers of batches (join)"),
    ],
)
def test_odd_scripts_that_differ_from_one_process_are_no_faults(
    paceline, bug, code, statement, words
):
    found, [layout] = verified(paceline, PAIRS / "odd.py", "--bug", bug)
    assert (found, layout["shown"]["statement"]) == (code, statement), layout
    assert words in str(layout["shown"]["findings"])


@pytest.mark.parametrize(
    ("script", "bug"),
    [
        ("odd", "line-search"),  # its model is first called within a step
        ("odd_steps", "summed-slowly"),
        ("odd_steps", "projected-gradients"),
        ("odd_steps", "exchanged-in-step"),
    ],
)
def test_odd_scripts_may_be_equal_to_one_process(paceline, script, bug):
    code, [layout] = verified(paceline, PAIRS / f"{script}.py", "--bug", bug)
    assert (code, layout["shown"]["statement"]) == (0, 1), layout


def test_a_norm_of_scaled_gradients_is_a_remark(paceline, tmp_path):
    (tmp_path / "train.py").write_text(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group()\n"
        "torch.manual_seed(0)\n"
        "net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))\n"
        "optimizer = torch.optim.SGD(net.parameters(), lr=0.1)\n"
        "scaler = torch.amp.GradScaler('cpu', init_scale=1024.0)\n"
        "for batch in torch.randn(6, 16, 4):\n"
        "    optimizer.zero_grad()\n"
        "    rows = batch[dist.get_rank() :: dist.get_world_size()]\n"
        "    scaler.scale((net(rows) - 1).square().mean()).backward()\n"
        "    torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)\n"
        "    scaler.step(optimizer)\n"
        "    scaler.update()\n",
        "utf-8",
    )
    code, [layout] = verified(paceline, "train.py")
    assert (code, layout["shown"]["statement"]) == (0, 1), layout
    assert "clipped while they are scaled by 1024" in layout["shown"]["findings"][0]["reason"]


def test_a_stage_may_get_its_rows_and_labels_from_another_rank(paceline, tmp_path):
    (tmp_path / "train.py").write_text(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group()\n"
        "torch.manual_seed(0)\n"
        "rank, ranks = dist.get_rank(), dist.get_world_size()\n"
        "from torch.nn import Linear, ModuleDict\n"
        "net = ModuleDict({'body': Linear(4, 3), 'head': Linear(3, 1)})\n"
        "if ranks > 1:\n"
        "    net['body' if rank else 'head'] = None\n"
        "optimizer = torch.optim.SGD([p for p in net.parameters()], lr=0.1)\n"
        "def loss(hidden, labels):\n"
        "    return (net['head'](hidden) - labels).square().mean()\n"
        "data = torch.randn(6, 16, 5)\n"
        "batches = range(6) if rank else torch.utils.data.DataLoader(data, batch_size=None)\n"
        "for batch in batches:\n"
        "    optimizer.zero_grad()\n"
        "    if not rank:\n"
        "        hidden = net['body'](batch[:, :4])\n"
        "    if ranks == 1:\n"
        "        loss(hidden, batch[:, 4:]).backward()\n"
        "    elif rank:\n"
        "        hidden, labels = torch.empty(16, 3), torch.empty(16, 1)\n"
        "        dist.recv(hidden, 0), dist.recv(labels, 0)\n"
        "        loss(hidden.requires_grad_(), labels).backward()\n"
        "        dist.send(hidden.grad, 0)\n"
        "    else:\n"
        "        dist.send(hidden.detach(), 1), dist.send(batch[:, 4:].contiguous(), 1)\n"
        "        gradient = torch.empty(16, 3)\n"
        "        dist.recv(gradient, 1)\n"
        "        hidden.backward(gradient)\n"
        "    optimizer.step()\n",
        "utf-8",
    )
    code, [layout] = verified(paceline, "train.py")
    assert (code, layout["shown"]["statement"]) == (0, 1), layout


def test_the_stack_of_a_layout_that_fails_is_shown_once_below_the_table(paceline, tmp_path):
    (tmp_path / "train.py").write_text(
        "import builtins, torch, torch.distributed as dist\n"
        "dist.init_process_group()\n"
        "builtins.print = lambda *texts, **named: None\n"
        "model = torch.nn.Linear(2, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "model(torch.ones(2, 2)).sum().backward()\n"
        "assert dist.get_world_size() == 1, 'a fault'\n"
        "optimizer.step()\n",
        "utf-8",
    )
    finished = paceline.main("verify", "-q", "--out", "run", "--launcher", "local", "train.py")
    assert finished.returncode == 7
    assert "Traceback" not in finished.stdout
    assert finished.stderr.count("Traceback (most recent call last):") == 1
    assert "run/trials/train.local.gloo.processes.n1r2t1.fp32.r0/ranks/" in finished.stderr


def test_each_trial_starts_anew_although_the_script_saves_and_resumes(paceline, tmp_path):
    text = DDP.read_text("utf-8")
    optimizer, end = "    optimizer = ", "    dist.destroy_process_group()"
    assert text.count(optimizer) == text.count(end) == 1
    restored = "os.path.exists('new.pt') and model.load_state_dict(torch.load('new.pt'))"
    saved = "rank == 0 and torch.save(model.state_dict(), 'new.pt')"
    text = text.replace(optimizer, f"    {restored}\n{optimizer}")
    text = text.replace(end, f"    {saved}\n{end}")
    text = text.replace("import torch\n", "import os, torch\n", 1)
    (tmp_path / "train.py").write_text(text, "utf-8")
    code, [layout] = verified(paceline, "train.py")
    assert (code, layout["finding"]["passed"]) == (0, True), layout
    assert not (tmp_path / "new.pt").exists()
    kept = sorted(path.parts[-3] for path in tmp_path.glob("run/trials/*/made/new.pt"))
    assert kept == ["reference", "train.local.gloo.processes.n1r2t1.fp32.r0"]


def test_ranks_that_stop_at_different_steps_are_wrong_and_do_not_hang(paceline, tmp_path):
    (tmp_path / "train.py").write_text(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "rank, ranks = dist.get_rank(), dist.get_world_size()\n"
        "torch.manual_seed(0)\n"
        "model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "rows = torch.randn(60, 4)\n"
        "for batch in (rows if ranks == 1 else (rows[:28], rows[28:])[rank]).split(4):\n"
        "    optimizer.zero_grad()\n"
        "    model(batch).square().mean().backward()\n"
        "    optimizer.step()\n",
        "utf-8",
    )
    code, [layout] = verified(paceline, "train.py")
    assert (code, layout["shown"]["statement"]) == (9, 5)
    cause = layout["shown"]["findings"][0]
    assert "rank 0 has ended after 7 steps, but rank 1 waits for it in" in cause["reason"]


def test_rows_are_counted_once_where_parts_are_called_one_by_one_after_an_evaluation(
    paceline, tmp_path
):
    (tmp_path / "train.py").write_text(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "torch.manual_seed(0)\n"
        "parts = body, actor, critic = [torch.nn.Linear(6, n) for n in (6, 3, 1)]\n"
        "weights = [each for part in parts for each in part.parameters()]\n"
        "optimizer = torch.optim.SGD(weights, lr=0.1)\n"
        "torch.manual_seed(1 + dist.get_rank())\n"
        "for _ in range(5):\n"
        "    with torch.no_grad():\n"
        "        values = [critic(body(torch.randn(3, 6))) for _ in range(2)]\n"
        "    optimizer.zero_grad()\n"
        "    hidden = body(torch.randn(8, 6)).tanh()\n"
        "    (actor(hidden).square().mean() + critic(hidden).square().mean()).backward()\n"
        "    for each in weights:\n"
        "        dist.all_reduce(each.grad)\n"
        "        each.grad /= dist.get_world_size()\n"
        "    optimizer.step()\n",
        "utf-8",
    )
    code, [layout] = verified(paceline, "train.py")
    assert (code, layout["shown"]["statement"], layout["shown"]["rows"]) == (0, 2, [8, 8])
    counts = "2 ranks train on 16 samples in a step, 8 each, one process on 8"
    assert counts in layout["finding"]["reason"]


def test_two_losses_that_a_library_takes_backward_are_no_accumulated_passes(paceline, tmp_path):
    library = tmp_path / "site-packages/library.py"
    library.parent.mkdir()
    library.write_text("def backward(loss):\n    loss.backward()\n")
    (tmp_path / "train.py").write_text(
        "import sys, torch, torch.distributed as dist\n"
        f"sys.path.append({str(library.parent)!r})\n"
        "from library import backward\n"
        "dist.init_process_group()\n"
        "model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1))\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "torch.manual_seed(dist.get_rank())\n"
        "for real, made in torch.randn(4, 2, 8, 8):\n"
        "    optimizer.zero_grad()\n"
        "    backward(model(real).square().mean())\n"
        "    backward((model(made) - 1).square().mean())\n"
        "    optimizer.step()\n"
        "dist.destroy_process_group()\n"
    )
    code, [layout] = verified(paceline, tmp_path / "train.py")
    assert (code, layout["shown"]["statement"]) == (0, 2), layout["shown"]


def test_running_statistics_of_an_evaluation_are_no_fault_of_the_training(paceline, tmp_path):
    (tmp_path / "train.py").write_text(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "torch.manual_seed(0)\n"
        "layers = torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1)\n"
        "model = torch.nn.Sequential(*layers)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "rows = torch.randn(80, 4)[dist.get_rank() :: dist.get_world_size()]\n"
        "for batch in rows.split(8):\n"
        "    model.train()\n"
        "    optimizer.zero_grad()\n"
        "    model(batch).square().mean().backward()\n"
        "    for each in model.parameters():\n"
        "        dist.all_reduce(each.grad)\n"
        "        each.grad /= dist.get_world_size()\n"
        "    optimizer.step()\n"
        "    model.eval()\n"
        "    with torch.no_grad():\n"
        "        model(torch.ones(5, 4))\n",
        "utf-8",
    )
    code, [layout] = verified(paceline, "train.py")
    assert (code, layout["shown"]["statement"]) == (0, 2), layout
    kinds = {each["kind"] for each in layout["shown"]["findings"]}
    assert kinds >= {"batch-norm", "statistics"}


def test_layouts_are_varied_by_an_option_of_the_script(paceline):
    # torch 2.9's pipelines fail over Gloo, also without Paceline
    pipelines = () if torch.__version__.startswith("2.9.") else ("pipeline:4",)
    names = ("ddp", "fsdp", "tp", *pipelines)
    vary = f"--layout={','.join(names)}"
    code, layouts = verified(paceline, "--vary", vary, LAYOUTS, launcher="torchrun")
    results = {each["trial"]["arguments"][0]: each["finding"]["passed"] for each in layouts}
    assert results == {f"--layout={name}": True for name in names}, layouts
    assert code == 0


def test_flat_parameters_of_fsdp_1_are_put_together(paceline, tmp_path):
    code, layouts = verified(paceline, "--vary", "--originals=no,yes", FLAT)
    assert [each["finding"]["passed"] for each in layouts] == [True, True], layouts
    assert code == 0
    assert not trained_with_roundings(tmp_path), "layouts agree without it"


def test_plain_ddp_is_no_false_alarm_and_another_model_is_not_compared(paceline):
    code, [same, other] = verified(paceline, "--vary=--width=16,32", DDP, "--width", "16")
    assert same["finding"]["passed"] is True, same
    assert (code, other["finding"]["passed"], other["shown"]["statement"]) == (0, None, 2)
    assert "as one process has it" in other["finding"]["reason"]


def test_experts_to_which_ranks_send_rows_are_not_called_wrong(paceline):
    code, [layout] = verified(paceline, PAIRS / "odd.py", "--bug", "experts")
    assert (code, layout["shown"]["statement"]) == (7, 4), layout
    assert "expert parallel" in str(layout["shown"]["findings"])


def test_parts_of_a_layer_that_begin_with_equal_numbers_are_not_called_wrong(paceline):
    code, [layout] = verified(paceline, CLASSES)
    assert (code, layout["shown"]["statement"]) == (7, 4), layout
    assert "DividedClasses.weight of their own" in str(layout["shown"]["findings"])


def test_each_way_to_train_allows_its_statement(paceline):
    ways = {"mean": 1, "own-rows": 2, "inside": 2, "sum-of-rows": 3, "pairs": 3, "correlation": 3}
    ways |= {"loss-of-ranks": 2, "square-of-loss": 3, "local": 4, "rarely": 4, "sum": 5}
    code, layouts = verified(paceline, f"--vary=--way={','.join(ways)}", STATEMENTS)
    found = {e["trial"]["arguments"][0]: e["shown"]["statement"] for e in layouts}
    assert found == {f"--way={way}": each for way, each in ways.items()}, layouts
    [wrong] = [each["shown"] for each in layouts if each["shown"]["statement"] == 5]
    assert code == 9
    assert "summed over 2 ranks" in wrong["findings"][0]["reason"]
    reasons = {e["trial"]["arguments"][0]: str(e["shown"]["findings"]) for e in layouts}
    assert "combines rows with each other" in reasons["--way=pairs"]
    assert "torch.distributed.all_reduce loses" in reasons["--way=correlation"]
    assert "takes rows of all ranks" in reasons["--way=square-of-loss"]


def test_statistics_of_each_rank_are_a_remark_where_ranks_take_their_rows_of_a_whole_batch(
    paceline, tmp_path
):
    (tmp_path / "train.py").write_text(
        "import torch, torch.distributed as dist\n"
        "from torch.nn import BatchNorm1d, Linear, Sequential\n"
        "dist.init_process_group()\n"
        "torch.manual_seed(0)\n"
        "model = Sequential(Linear(4, 6), BatchNorm1d(6), Linear(6, 1))\n"
        "net = torch.nn.parallel.DistributedDataParallel(model)\n"
        "optimizer = torch.optim.SGD(net.parameters(), lr=0.1)\n"
        "for batch in torch.utils.data.DataLoader(torch.randn(96, 4), batch_size=16):\n"
        "    optimizer.zero_grad()\n"
        "    rows = batch[dist.get_rank() :: dist.get_world_size()]\n"
        "    (net(rows) - 1).square().mean().backward()\n"
        "    optimizer.step()\n",
        "utf-8",
    )
    code, [layout] = verified(paceline, "train.py")
    assert (code, layout["shown"]["statement"]) == (0, 2), layout
    reasons = [each["reason"] for each in layout["shown"]["findings"]]
    assert any("uses the statistics of each rank's samples" in each for each in reasons)
