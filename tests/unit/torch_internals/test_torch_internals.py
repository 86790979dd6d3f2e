"""Each name of torch without a stable interface exists, behaves as used, and has one home."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.profiler import record_function
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline import torch_internals
from paceline.torch_internals import FakeTensor, FakeTensorMode, GradBucket, HashStore, PrefixStore
from paceline.transports import gloo_group

PACKAGE = Path(paceline.__file__).parent
HOME = PACKAGE / "torch_internals"
LIMIT = timedelta(seconds=30)


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def test_prefixes_separate_the_keys_of_a_store() -> None:
    store = HashStore()
    PrefixStore("one", store).set("key", "1")
    assert not PrefixStore("two", store).check(["key"])
    assert PrefixStore("one", store).get("key") == b"1"


def test_tcp_store_answers_its_own_client() -> None:
    server = torch_internals.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = torch_internals.TCPStore("127.0.0.1", server.port, wait_for_workers=False)
    client.set("key", "1")
    assert server.get("key") == b"1"
    assert isinstance(client, torch_internals.Store)


def test_abort_leaves_no_group(group: None) -> None:
    torch_internals.abort_process_groups()
    assert not dist.is_initialized()


def test_profiler_is_enabled_within_a_profile_and_shows_an_event_until_its_future_is_done() -> None:
    assert not torch_internals.profiler_enabled()
    ended: torch.futures.Future[None] = torch.futures.Future()
    with torch.profiler.profile() as profile:
        assert torch_internals.profiler_enabled()
        with record_function("event") as event:
            torch_internals.end_event_with(event, ended)
        ended.set_result(None)
    assert "event" in {row.key for row in profile.key_averages()}


# Methods of a process group that torch 2.9 does not have, or not yet torch 2.13.
NEW_METHODS = {
    "all_gather_single", "all_gather_single_coalesced", "all_to_all_single", "gather_into_tensor",
    "gather_single", "reduce_scatter_single", "reduce_scatter_single_coalesced", "reconfigure",
    "get_reconfigure_handle", "register_pre_hook", "register_post_hook", "register_abort_hook",
    "unregister_pre_hook", "unregister_post_hook", "unregister_abort_hook", "new_window",
    "_add_ephemeral_timeout",
}  # fmt: skip


def test_recorded_methods_are_those_of_a_process_group() -> None:
    named = {
        *gloo_group.OPERATIONS, *gloo_group.REDUCE_SCATTERS, *gloo_group.MESSAGES,
        *gloo_group._OTHERS,
    }  # fmt: skip
    assert named > NEW_METHODS
    for name in named - NEW_METHODS:
        assert callable(getattr(dist.ProcessGroup, name)), name


def test_methods_of_the_mpi_group_are_those_of_a_process_group() -> None:
    module = pytest.importorskip("paceline.transports.mpi.process_group", exc_type=ImportError)
    private = {"_allgather_base", "_start_coalescing", "_end_coalescing", "_reduce_scatter_base"}
    assert private & set(dir(module.MpiProcessGroup)) <= set(dir(dist.ProcessGroup))
    assert private <= set(dir(module.MpiProcessGroup))


def test_a_group_sums_with_the_registered_backend() -> None:
    store = HashStore()
    backend = torch_internals.ProcessGroupGloo(store, 0, 1, timeout=LIMIT)
    outer: Any = dist.ProcessGroup(store, 0, 1)
    kind = dist.ProcessGroup.BackendType.GLOO
    torch_internals.set_default_backend(outer, kind)
    torch_internals.register_backend(outer, ["cpu"], kind, backend)
    torch_internals.set_group_name(outer, "name")
    summed = torch.ones(2)
    work = outer.allreduce([summed])
    assert isinstance(work, torch_internals.Work)
    work.wait()
    assert outer.group_name == "name"
    assert summed.tolist() == [1.0, 1.0]


def test_group_of_gloo_is_not_one_of_nccl_on_any_device(group: None) -> None:
    devices = (torch.device("cpu"), torch.device("cuda"), torch.device("meta"))
    assert not any(torch_internals.is_nccl(dist.group.WORLD, device) for device in devices)


def test_backend_of_the_class_of_nccl_is_nccl(group: None, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = torch_internals.ProcessGroupGloo
    monkeypatch.setattr(dist.distributed_c10d, "ProcessGroupNCCL", kind, raising=False)
    assert torch_internals.is_nccl(dist.group.WORLD, torch.device("cpu"))
    assert not torch_internals.is_nccl(dist.group.WORLD, torch.device("meta"))


def test_group_collects_its_operations_within_torchs_block(group: None) -> None:
    world = dist.group.WORLD
    assert not torch_internals.is_coalescing(world)
    with dist.distributed_c10d._coalescing_manager(world):
        assert torch_internals.is_coalescing(world)
    assert not torch_internals.is_coalescing(world)


def test_functions_are_called_before_and_after_a_method() -> None:
    class Counter:
        def add(self, number: int, *, times: int = 1) -> int:
            if number < 0:
                raise ValueError("negative")
            return number * times

    called: list[Any] = []

    def before(counter: Counter, arguments: tuple[Any, ...]) -> str:
        called.append((type(counter), arguments))
        return "begun"

    torch_internals.surround_method(Counter, "add", before, lambda *found: called.append(found))
    assert Counter().add(2, times=3) == 6
    with pytest.raises(ValueError, match="negative"):
        Counter().add(-1)
    assert called == [(Counter, (2,)), ("begun", 6), (Counter, (-1,))]


def test_source_rank_is_that_of_the_received_message() -> None:
    store = HashStore()  # each end connects in a thread of its own
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(
            lambda rank: torch_internals.ProcessGroupGloo(store, rank, 2, timeout=LIMIT), range(2)
        )
    received = torch.zeros(1)
    work = first.recv_anysource([received], 7)
    second.send([torch.ones(1)], 0, 7).wait()
    work.wait()
    assert torch_internals.source_rank(work) == 1
    assert received.item() == 1.0


def test_factor_of_a_multiplied_sum() -> None:
    reduce_op = dist._make_nccl_premul_sum(0.25)
    assert torch_internals.factor_of(reduce_op) == 0.25


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
        if not file.is_relative_to(HOME)
        for name in private_names(file.read_text(encoding="utf-8"))
        if not name.startswith(others)
    ]
    assert not offenders, "import them from paceline.torch_internals"
