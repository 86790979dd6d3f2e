"""Each name of torch without a stable interface exists, behaves as used, and has one home."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.base import torch_internals
from paceline.base.torch_internals import FakeTensor, FakeTensorMode, GradBucket, HashStore

PACKAGE = Path(paceline.__file__).parent
HOMES = (PACKAGE / "base" / "torch_internals", PACKAGE / "collectives" / "torch_internals.py")
LIMIT = timedelta(seconds=30)


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def test_abort_leaves_no_group(group: None) -> None:
    torch_internals.abort_process_groups()
    assert not dist.is_initialized()


def test_ddp_gives_its_hook_the_buckets_and_ignores_excluded_parameters(group: None) -> None:
    buckets: list[int] = []

    def hook(_: None, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        buckets.append(bucket.buffer().numel())
        assert bucket.is_last()
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    hook.__annotations__ = {"bucket": GradBucket, "return": torch.futures.Future[torch.Tensor]}
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 2, bias=False))
    torch_internals.exclude_from_ddp(model, ["0.weight"])
    parallel = DistributedDataParallel(model)
    parallel.register_comm_hook(None, hook)
    parallel(torch.ones(1, 4)).sum().backward()
    assert buckets == [8]
    assert model[0].weight.grad is not None


def test_function_is_called_after_the_last_gradient() -> None:
    weight = torch.ones(1, requires_grad=True)
    seen: list[Any] = []

    def in_pass(gradient: torch.Tensor) -> None:
        torch_internals.call_after_backward(lambda: seen.append(weight.grad))

    product = weight * 2
    product.register_hook(in_pass)
    product.sum().backward()
    assert seen[0].tolist() == [2.0]


def test_storage_number_is_that_of_views_and_of_fake_tensors() -> None:
    tensor = torch.ones(4)
    number = torch_internals.storage_number
    assert number(tensor) == number(tensor[1:]) != number(torch.ones(4))
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = torch.empty(2, 3)
        assert number(fake) == number(fake.T)


def test_fake_tensors_have_shapes_alone() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        product = torch.empty(1_000_000, 1_000_000) @ torch.empty(1_000_000, 2)
    assert isinstance(product, FakeTensor)
    assert product.shape == (1_000_000, 2)


@pytest.mark.parametrize("layer", [nn.BatchNorm1d(2), nn.BatchNorm3d(2), nn.SyncBatchNorm(2)])
def test_batch_norm_layers(layer: nn.Module) -> None:
    assert isinstance(layer, torch_internals.BatchNormLayer)
    assert not isinstance(nn.GroupNorm(1, 2), torch_internals.BatchNormLayer)


@pytest.mark.parametrize("layer", [nn.Dropout(), nn.Dropout2d(), nn.AlphaDropout()])
def test_dropout_layers(layer: nn.Module) -> None:
    assert isinstance(layer, torch_internals.DropoutLayer)
    assert layer.p == 0.5


def test_children_contain_a_module_once_for_each_use() -> None:
    layer = nn.ReLU()
    model = nn.Sequential(layer, layer)
    assert list(torch_internals.children_of(model).items()) == [("0", layer), ("1", layer)]


def test_changed_buffers_are_those_of_the_module() -> None:
    layer = nn.BatchNorm1d(2)
    mean = torch.full((2,), 3.0)
    torch_internals.buffers_of(layer)["running_mean"] = mean
    assert layer.running_mean is mean


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_operations_that_draw_random_numbers_are_noted(dropout: float) -> None:
    units = torch.zeros((1, 2, 4, 8), device="meta")
    with torch_internals.RandomOperations() as random:
        nn.functional.scaled_dot_product_attention(units, units, units, None, dropout).relu()
    assert random.first == ("bernoulli_" if dropout else None)


@pytest.mark.parametrize("workers", [0, 1])
def test_loops_over_a_data_loader_call_its_iterator(workers: int) -> None:
    loader = DataLoader(TensorDataset(torch.ones(2, 1)), num_workers=workers)
    following = iter(loader)
    assert isinstance(following, torch_internals.DataLoaderIterator)
    assert "__next__" not in type(following).__dict__


def private_names(source: str) -> list[str]:
    """Return the private names of torch that a module uses, and private names of other objects."""
    tree = ast.parse(source)
    found: list[str] = []
    own = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and is_written(n)}
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=str(module)) if module.split(".")[0] == "torch":
                found += [f"{module}.{a.name}" for a in node.names if has_private(module, a.name)]
            case ast.Import():
                found += [a.name for a in node.names if has_private(a.name)]
            case ast.Attribute(attr=attr) if is_private(attr) and attr not in own:
                if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")):
                    found.append(ast.unparse(node))
    return found


def is_written(node: ast.Attribute) -> bool:
    return isinstance(node.ctx, ast.Store)


def has_private(*names: str) -> bool:
    return any(is_private(part) for name in names for part in name.split("."))


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def test_private_names_are_found() -> None:
    assert private_names("from torch._C import x") == ["torch._C.x"]
    assert private_names("import torch._dynamo") == ["torch._dynamo"]
    assert private_names("from torch.nn.modules.batchnorm import _BatchNorm")
    assert private_names("def f(model): return model._modules") == ["model._modules"]
    assert private_names("torch.autograd.Variable._execution_engine.queue_callback(f)")
    assert not private_names("class A:\n def f(self): self._x = 1; return self._x")


def test_no_other_module_uses_private_names_of_torch() -> None:
    # of the interpreter and of PySpark, which have no public ones for these
    others = (
        "os._exit",
        "SparkContext.",
        "context._jsc",
        "spark.sparkContext.",
        "cast(Any, session.sparkContext).",
    )
    offenders = [
        f"{file.relative_to(PACKAGE)}: {name}"
        for file in PACKAGE.rglob("*.py")
        if not any(file.is_relative_to(home) for home in HOMES)
        for name in private_names(file.read_text(encoding="utf-8"))
        if not name.startswith(others)
    ]
    assert not offenders, "import them from paceline.base.torch_internals"
