"""One trial of a spec: what may be combined, and with which words the rest is refused."""

import pytest
from tests.support.specs import spec_text

from paceline.base.errors import UsageError
from paceline.plan.spec.loading import parse_spec

NODES = "nodes = 2; [network]; interface = 'eth0'"


def spec(way: str, keys: str = "") -> str:
    """`way` is launcher/strategy; keys are TOML lines with `;` between them."""
    launcher, strategy = way.split("/")
    trial = f'launcher = "{launcher}"; local_strategy = "{strategy}"; {keys}'
    return spec_text(trial, workload='name = "tiny"; global_batch = 24')


def faults_of(text: str) -> list[str]:
    with pytest.raises(UsageError) as raised:
        parse_spec(text, "mine.toml")
    return str(raised.value).splitlines()[1:]


@pytest.mark.parametrize(
    ("way", "keys", "expected"),
    [
        # keys that a strategy knows nothing of
        ("local/threads", "stages = 2",
         'stages: has no meaning for local_strategy "threads"; remove it, or use'),
        ("local/processes", "micro_batches = 2", '= "pipeline" or "hybrid"'),
        ("local/processes", "split_points = [3]", "split_points: has no meaning"),
        ("local/pipeline", "replicas = 2", '"threads", "processes" or "hybrid"'),
        ("local/pipeline", 'reduction = "flat"', '= "processes"'),
        # too few
        ("mpi/threads", 'link = "1gbit"', 'link: "1gbit" is a rate between nodes, got nodes = 1'),
        ("mpi/threads", f'link = "fast"; replicas = 2; {NODES}', "link: expected a rate such as"),
        ("local/threads", "nodes = 0", "nodes: input should be greater than or equal to 1, got 0"),
        ("local/threads", "replicas = 1", 'for one use local_strategy = "sequential"'),
        ("local/threads", "threads_per_rank = 1", "one for each replica, got 1"),
        ("local/threads", "ranks_per_node = 2", '"threads" has one process per node, got 2'),
        ("local/hybrid", "replicas = 1", 'for one use local_strategy = "pipeline"'),
        ("local/hybrid", "stages = 1", 'for one use local_strategy = "processes"'),
        ("local/pipeline", "stages = 1", 'for one use local_strategy = "sequential"'),
        ("local/pipeline", "ranks_per_node = 1", "needs at least 2, got 1"),
        # numbers that contradict each other
        ("local/threads", "replicas = 2; threads_per_rank = 3",
         "multiple of the 2 replicas, got 3; use 4"),
        ("local/processes", "replicas = 2; ranks_per_node = 3", "expected 3 as ranks_per_node"),
        ("local/pipeline", "stages = 2; ranks_per_node = 3", "expected 2, got 3"),
        ("local/pipeline", "split_points = [3]; ranks_per_node = 3", "expected 2, got 3"),
        ("local/hybrid", "stages = 2; replicas = 2; ranks_per_node = 6", "x stages = 4, got 6"),
        ("local/hybrid", "ranks_per_node = 5", "multiple of the 2 stages, at least 4, got 5"),
        ("local/hybrid", "ranks_per_node = 2", "multiple of the 2 stages, at least 4, got 2"),
        ("local/hybrid", "ranks_per_node = 8; replicas = 3", "of the 3 replicas, at least 6"),
        # split points
        ("local/pipeline", 'split_points = [3]; balance = "size"', 'remove balance = "size"'),
        ("local/pipeline", "split_points = [3, 3]", "ascending order, each once, got [3, 3]"),
        ("local/pipeline", "stages = 2; split_points = [3, 5]",
         "2 stages have 1, got 2; use stages = 3"),
        ("local/pipeline", "split_points = []", "split_points: "),
        ("local/pipeline", "split_points = [0]", "split_points[1]: "),
        ("local/pipeline", "split_points = [4]", "can begin at layer 2, 3, 5, 6, 8"),
        ("local/pipeline", "stages = 14", "tiny-alexnet has at most 13, got 14"),
        # micro-batches and batches
        ("local/pipeline", "stages = 2; micro_batches = 25", "is 24 sample(s), expected at most"),
        ("local/hybrid", "replicas = 2; micro_batches = 13", "is 12 sample(s), expected at most"),
        ("local/threads", "replicas = 5", "among 5 replicas; use a multiple of 5, for example 25"),
        # training without a barrier
        ("local/parameter-server", "push_period_steps = 2", '"synchronous" pushes and fetches in'),
        ("local/parameter-server", 'update_mode = "stale-synchronous"; fetch_period_steps = 2',
         'use update_mode = "asynchronous" or "shat"'),
        ("local/parameter-server", 'update_mode = "asynchronous"; staleness_bound_steps = 2',
         '"asynchronous" has no bound'),
        ("local/parameter-server", 'compression = "bf16"', '"parameter-server" has none'),
        ("mpi/parameter-server", 'sufficient_factors = "always"', '"parameter-server" has none'),
        ("local/parameter-server", 'transport = "shared"',
         'does not send messages between two ranks, which "parameter-server" needs; use "gloo"'),
        ("local/parameter-server", 'device = "cuda"; ranks_per_node = 2; transport = "gloo"',
         'updates weights in the memory of CPUs; use local_strategy = "processes"'),
        ("mpi/hogwild", "ranks_per_node = 2; " + NODES, "shares the memory of one node, got 2"),
        ("local/hogwild", 'transport = "gloo"', "is not used within a node"),
        ("local/sharded", 'transport = "shared"',
         'no process group of torch, which "sharded" needs; use "gloo"'),
        ("local/sharded", 'transport = "gloo"; compression = "bf16"', '"sharded" has none'),
        ("mpi/sharded", "ranks_per_node = 2; sufficient_factors = 'always'; " + NODES,
         '"sharded" has none'),
        ("local/sharded", 'device = "cuda"; ranks_per_node = 2; transport = "gloo"',
         'divides parameters in the memory of CPUs, expected "cpu"'),
        ("local/pipeline", "stages = 2; vertical_sync = true", 'schedule = "pipedream"; remove'),
        ("local/pipeline", 'stages = 4; micro_batches = 2; schedule = "pipedream"',
         "need at least 3, got 2"),
        ("local/hybrid", 'replicas = 2; schedule = "pipedream"', "on one node, got 2; use"),
        # transports
        ("local/threads", 'transport = "shared"', 'a single one; use "none"'),
        ("local/pipeline", 'transport = "none"', 'must average gradients; use "shared"'),
        ("local/pipeline", 'transport = "gloo"', "is not used within a node"),
        ("mpi/hybrid", 'replicas = 2; transport = "mpi"', 'through memory; use "shared"'),
        ("torchrun/processes", 'transport = "mpi"',
         'needs launcher = "mpi" or "spark", got "torchrun"'),
        ("mpi/processes", 'transport = "none"',
         'must average gradients; use "shared", "gloo", "paceline" or "mpi"'),
        # how gradients travel
        ("mpi/processes", 'transport = "spark-rounds"', 'needs launcher = "spark", got "mpi"'),
        ("spark/pipeline",
         'nodes = 2; stages = 2; transport = "spark-rounds"; [network]; interface = "eth0"',
         'needs local_strategy = "processes", got "pipeline"'),
        ("mpi/processes", 'algorithm = "ring"',
         'algorithm: has no meaning for transport "shared"; remove it, or use transport = "mpi"'),
        ("mpi/processes", 'compression = "bf16"',
         'transport = "gloo", "paceline", "mpi" or "nccl"'),
        ("mpi/processes", 'transport = "gloo"; compression_rank = 2',
         'use compression = "powersgd"'),
        ("mpi/processes", 'transport = "gloo"; averaging_start_step = 2',
         "needs averaging_period_steps"),
        ("mpi/processes", "averaging_period_steps = 4",
         "expected a transport that averages weights"),
        ("mpi/processes", 'transport = "gloo"; averaging_period_steps = 4; compression = "bf16"',
         "use one of the two"),
        ("spark/processes", 'mpi_parameters = {coll = "^han"}',
         'remove it, or use launcher = "mpi"'),
        ("local/processes", 'transport = "nccl"', 'carries the memory of "cuda" devices'),
        ("local/hybrid", 'device = "cuda"; replicas = 2; transport = "nccl"',
         'got "hybrid"; use "sha'),
        ("mpi/processes", 'ranks_per_node = 2; transport = "shared"; ' + NODES,
         'joins the ranks of one node, got nodes = 2; use "gloo", "paceline" or "mpi"'),
        # reductions
        ("local/processes", 'reduction = "flat"', "is for processes on several nodes"),
        ("spark/processes",
         'device = "cuda"; ranks_per_node = 2; reduction = "hierarchical"; ' + NODES,
         'on GPUs use "flat"'),
        ("local/processes", 'reduction = "zero-1"', "is for processes on several nodes"),
        ("mpi/processes",
         'ranks_per_node = 2; reduction = "zero-1"; compression = "bf16"; ' + NODES,
         'reduction = "zero-1" has none; remove it, or use reduction = "hierarchical"'),
        ("mpi/processes",
         'ranks_per_node = 2; reduction = "zero-1"; sufficient_factors = "always"; ' + NODES,
         'reduction = "zero-1" has none'),
        ("mpi/processes",
         'ranks_per_node = 2; reduction = "zero-1"; averaging_period_steps = 4; ' + NODES,
         "averages the weights of all ranks at once"),
        ("spark/processes",
         'ranks_per_node = 2; reduction = "zero-1"; transport = "spark-rounds"; ' + NODES,
         "reduces among all ranks at once"),
        ("spark/processes", 'device = "cuda"; ranks_per_node = 2; reduction = "zero-1"; ' + NODES,
         'on GPUs use "flat"'),
        ("mpi/parameter-server", 'ranks_per_node = 2; reduction = "zero-1"; ' + NODES,
         "reduction: has no meaning"),
        # GPUs
        ("local/intraop", 'device = "cuda"; threads_per_rank = 2', "uses threads of the CPU"),
        ("local/threads", 'device = "cuda"; replicas = 2', "GPUs need one process each"),
        ("local/pipeline", 'device = "cuda"', "give stages as a number"),
        ("local/processes", 'device = "cuda"; replicas = 2; transport = "shared"',
         'use "gloo" or "nccl"'),
        ("mpi/sequential", 'device = "cuda"; transport = "mpi"; ' + NODES,
         '"mpi" carries the memory of "cpu" devices, got device = "cuda"; use "gloo"'),
        # several nodes
        ("local/threads", "replicas = 2; " + NODES, "starts ranks on this node only"),
        ("torchrun/pipeline", "stages = 2; " + NODES, "starts ranks on this node only"),
        ("mpi/intraop", NODES, "give threads_per_rank as a number"),
        ("mpi/threads", NODES, "give replicas as a number"),
        ("mpi/processes", NODES, "give ranks_per_node as a number"),
        ("spark/pipeline", NODES, "give stages as a number"),
        ("spark/hybrid", NODES, "give replicas as a number"),
        ("spark/pipeline", "stages = 2; nodes = 2", "[network] interface"),
        # what a search is to find, and trials of some workloads
        ("local/best", "", "add a table [tune]"),
        ("local/best", "stages = 2; [tune]", 'stages: the search finds it for "best"'),
        ("mpi/best", "ranks_per_node = 2; [tune]", "ranks_per_node: "),
        ("mpi/best", 'transport = "mpi"; [tune]', "transport: "),
        ("mpi/best", 'algorithm = "ring"; [tune]', "has no meaning for a trial without transport;"),
        ("mpi/best", 'device = "cuda"; [tune]', "device: "),
        ("spark/best", "nodes = 2; [tune]", "[network] interface"),
        ("mpi/best", "transport = 'nccl'; " + NODES + "; [tune]",
         'carries the memory of "cuda" devices'),
        ("local/threads", "arguments = ['x']", "arguments: expected only with a script, and tiny"),
        ("local/threads", "environment = {A = 'b'}", "environment: expected only with a script"),
        ("local/threads", "workloads = ['simple-big']", '[[workloads]] (tiny), got "simple-big"'),
    ],
)  # fmt: skip
def test_combination_that_cannot_work_is_refused_with_one_reason(way, keys, expected):
    (fault,) = faults_of(spec(way, keys))
    assert expected in fault
    assert "trials[2]" in fault


@pytest.mark.parametrize(
    ("way", "keys"),
    [
        ("local/threads", ""),
        ("local/threads", "replicas = 2; threads_per_rank = 4"),
        ("mpi/processes", 'replicas = "auto"; ranks_per_node = 2; transport = "shared"'),
        ("mpi/processes", 'ranks_per_node = 2; reduction = "flat"; transport = "mpi"; ' + NODES),
        ("spark/processes",
         'ranks_per_node = 2; reduction = "zero-1"; transport = "gloo"; ' + NODES),
        ("torchrun/pipeline", 'stages = "auto"; micro_batches = "auto"; schedule = "gpipe"'),
        ("spark/pipeline",
         "stages = 3; ranks_per_node = 3; split_points = [2, 9]; micro_batches = 24"),
        ("local/hybrid", "ranks_per_node = 6; replicas = 2"),
        ("mpi/hybrid", 'replicas = 2; stages = 2; transport = "gloo"; ' + NODES),
        ("spark/threads", "replicas = 2; " + NODES),
        ("spark/parameter-server", 'update_mode = "shat"; push_period_steps = 2'),
        ("mpi/parameter-server", 'ranks_per_node = 2; transport = "mpi"; ' + NODES),
        ("spark/hogwild", "ranks_per_node = 3"),
        ("local/sharded", "ranks_per_node = 3"),
        ("mpi/sharded", 'ranks_per_node = 2; transport = "mpi"; ' + NODES),
        ("mpi/pipeline", 'stages = 3; schedule = "pipedream"; vertical_sync = true'),
        ("spark/sequential", NODES),
        ("mpi/processes", 'device = "cuda"; replicas = 2; transport = "nccl"'),
        ("local/hybrid", 'device = "cuda"; replicas = 2; transport = "shared"'),
        ("local/sequential", 'device = "cuda"'),
        ("mpi/best", NODES + "; [tune]"),
        ("mpi/best", "transport = 'mpi'; " + NODES + "; [tune]"),
        ("spark/hybrid", NODES + "; [tune]"),  # the search fills in the replicas
        ("local/threads", "workloads = ['tiny']"),
    ],
)  # fmt: skip
def test_combination_that_works_is_read(way, keys):
    trial = parse_spec(spec(way, keys), "mine.toml").trials[1]
    assert f"{trial.launcher}/{trial.local_strategy}" == way


def test_faults_of_one_trial_are_told_together():
    text = spec(
        "mpi/pipeline", 'replicas = 2; split_points = [5, 3]; balance = "time"; transport = "none"'
    )
    assert len(faults_of(text)) == 4


def test_the_same_trial_twice_is_refused():
    again = '[[trials]]; launcher = "local"; local_strategy = "threads"; replicas = 2'
    (fault,) = faults_of(spec("local/threads", f"replicas = 2; {again}"))
    assert "trials[3]: equal to an earlier one" in fault
    assert "use `repeats` to repeat" in fault


def test_every_workload_needs_its_baseline():
    text = spec("local/threads").replace('"sequential"', "'sequential'; workloads = ['tiny']")
    text += "[[workloads]]\nname = 'simple-big'\n"
    (fault,) = faults_of("\n".join(text.split("; ")))
    assert "expected the baseline of simple-big" in fault


def test_batch_of_a_workload_that_a_trial_is_not_for_does_not_matter():
    big = "[[workloads]]; name = 'simple-big'; global_batch = 25"
    faults = faults_of(spec("local/threads", f"replicas = 2; {big}"))
    assert len(faults) == 1
    assert "workload simple-big" in faults[0]
    parse_spec(spec("local/threads", f"replicas = 2; workloads = ['tiny']; {big}"), "mine.toml")
