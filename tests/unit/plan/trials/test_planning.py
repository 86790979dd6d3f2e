from pathlib import Path

import pytest
from tests.support.specs import spec_text
from tests.support.trials import tiny_trial

from paceline.base.errors import UsageError
from paceline.plan.spec.loading import load_spec, parse_spec
from paceline.plan.spec.values import Target
from paceline.plan.trials.planning import plan_trials
from paceline.plan.trials.trial import Evaluation, Trial

SPEC = spec_text(
    'launcher = "mpi"; local_strategy = "processes"',
    'launcher = "local"; local_strategy = "intraop"; precision = "bf16"',
    workload='name = "tiny"; max_steps = 5; [[workloads]]; name = "simple-big"',
    tables="[training]; max_steps = 10; learning_rate = 0.5",
    seed=7,
    repeats=3,
)
DATA = {"tiny": "/data/tiny", "simple-big": "/data/big"}


def planned(cores: int = 4) -> list[Trial]:
    return plan_trials(parse_spec(SPEC, "test"), DATA, cores)


def test_every_repeat_holds_every_trial_once():
    trials = planned()
    blocks = [trials[i : i + 6] for i in range(0, 18, 6)]
    names = {t.configuration for t in trials}
    assert len(names) == 6
    for repeat, block in enumerate(blocks):
        assert {t.configuration for t in block} == names
        assert {t.repeat for t in block} == {repeat}


def test_order_is_the_seeds_and_differs_between_repeats():
    first, again = ([t.id for t in planned()] for _ in range(2))
    assert first == again
    assert [i[:-2] for i in first[:6]] != [i[:-2] for i in first[6:12]]


def test_names_are_stable_and_unique():
    ids = [t.id for t in planned()]
    assert len(set(ids)) == len(ids)
    assert "tiny.mpi.shared.processes.n1r4t1.fp32.r0" in ids
    assert "simple-big.local.none.intraop.n1r1t4.bf16.r2" in ids


def test_options_of_a_script_are_readable_in_names_and_never_alike():
    (plain, *others) = (
        tiny_trial(arguments=(argument,)).configuration.rpartition(".")[2]
        for argument in ("--layout=ddp", "--lr=0.1", "--lr=0-1", "--lr=0_1")
    )
    assert plain == "layout-ddp"
    assert len(set(others)) == 3


def test_nearest_value_wins():
    by_name = {t.id: t.training for t in planned()}
    tiny = by_name["tiny.local.none.sequential.n1r1t1.fp32.r0"]
    big = by_name["simple-big.local.none.sequential.n1r1t1.fp32.r0"]
    assert (tiny.max_steps, big.max_steps) == (5, 10)
    assert (tiny.learning_rate, big.learning_rate) == (0.5, 0.5)
    assert (tiny.global_batch, big.global_batch) == (32, 64)
    assert tiny.dataset == "/data/tiny"


def test_evaluations_are_part_of_the_training_unless_rounds_of_tasks_train():
    keys = (
        'held_out_samples = 9\ntarget = { metric = "accuracy", at_least = 1 }\n'
        '[[workloads]]\nname = "tiny"\nevaluate_every_steps = 3\n'
    )
    spec = SPEC.replace('[[workloads]]\nname = "tiny"\n', keys)
    by_name = {t.configuration: t.training for t in plan_trials(parse_spec(spec, "test"), DATA, 4)}
    tiny = by_name["tiny.local.none.sequential.n1r1t1.fp32"].evaluation
    big = by_name["simple-big.local.none.sequential.n1r1t1.fp32"].evaluation
    assert tiny == Evaluation(
        held_out_samples=9, split_seed=7, every_steps=3, every_epochs=None,
        target=Target(metric="accuracy", at_least=1),
    )  # fmt: skip
    assert (big.every_steps, big.every_epochs) == (None, 1)
    own = SPEC.replace('name = "tiny"\n', 'name = "tiny"\ndata = "d"\nheld_out_data = "v"\n', 1)
    by_name = {t.configuration: t.training for t in plan_trials(parse_spec(own, "test"), DATA, 4)}
    tiny = by_name["tiny.local.none.sequential.n1r1t1.fp32"].evaluation
    assert (tiny.held_out_samples, tiny.held_out_data) == (0, str(Path("v").absolute()))
    rounds = (
        '[[trials]]\nlauncher = "spark"\nlocal_strategy = "processes"\nranks_per_node = 2\n'
        'transport = "spark-rounds"\naveraging_period_steps = 2\n'
    )
    with pytest.raises(UsageError, match=r'held_out_samples: transport "spark-rounds" .* cannot'):
        plan_trials(parse_spec(spec + rounds, "test"), DATA, 4)


def test_checkpoints_are_of_trials_that_write_them_themselves():
    rounds = (
        '[[trials]]\nlauncher = "spark"\nlocal_strategy = "processes"\nranks_per_node = 2\n'
        'transport = "spark-rounds"\naveraging_period_steps = 2\n[checkpoint]\nevery_steps = 3\n'
    )
    trials = plan_trials(parse_spec(SPEC + rounds, "test"), DATA, 4)
    written = {t.transport: t.checkpoint is not None for t in trials}
    assert written == {"none": True, "shared": True, "spark-rounds": False}


def test_each_repeat_has_another_seed_if_the_spec_says_so():
    varied = parse_spec(SPEC.replace("seed = 7", "seed = 7\nvary_seed = true"), "test")
    trials = plan_trials(varied, DATA, 4)
    assert {(t.repeat, t.training.seed) for t in trials} == {(0, 7), (1, 8), (2, 9)}
    assert sorted(t.id for t in trials) == sorted(t.id for t in planned())
    assert {t.training.seed for t in planned()} == {7}


def test_baselines_come_first_where_others_need_their_states():
    varied = parse_spec(SPEC.replace("seed = 7", "seed = 7\nvary_seed = true"), "test")

    def leading(trials):
        blocks = [trials[i : i + 6] for i in range(0, 18, 6)]
        return [[t.is_baseline for t in b] == sorted((t.is_baseline for t in b), reverse=True)
                for b in blocks]  # fmt: skip

    assert leading(plan_trials(varied, DATA, 4)) == [True, True, True]
    assert leading(planned())[0]
    assert not all(leading(planned()))  # the order of later repeats is drawn


def test_auto_takes_the_cores():
    place = {t.local_strategy: t.placement for t in planned(cores=8)}
    assert (place["processes"].ranks_per_node, place["processes"].threads_per_rank) == (8, 1)
    assert (place["intraop"].ranks_per_node, place["intraop"].threads_per_rank) == (1, 8)
    assert (place["sequential"].ranks_per_node, place["sequential"].threads_per_rank) == (1, 1)


def test_auto_is_the_largest_number_that_divides_the_batch():
    ranks = {t.placement.ranks for t in planned(cores=15) if t.local_strategy == "processes"}
    assert ranks == {8}  # of batches of 32 and 64


def test_first_rank_of_a_trial_is_rank_0(context_of):
    assert [context_of(rank, 3).is_first for rank in range(3)] == [True, False, False]


def test_trial_without_special_options_has_no_details():
    assert planned()[0].details == []


def test_trial_survives_json():
    for trial in planned():
        assert Trial.model_validate_json(trial.model_dump_json()) == trial


def test_only_the_sequential_local_trial_is_the_baseline():
    assert {t.configuration for t in planned() if t.is_baseline} == {
        "tiny.local.none.sequential.n1r1t1.fp32",
        "simple-big.local.none.sequential.n1r1t1.fp32",
    }


def beside_baseline(*trials: str, cores: int = 4, batch: int = 24) -> list[Trial]:
    text = spec_text(*trials, workload=f'name = "tiny"; global_batch = {batch}', repeats=1)
    return plan_trials(parse_spec(text, "test"), {"tiny": "/data"}, cores)


def one(way: str, keys: str = "", *, cores: int = 4, batch: int = 24) -> Trial:
    """The single other trial of a spec; keys are TOML lines with `;` between them."""
    launcher, strategy = way.split("/")
    asked = f"launcher = '{launcher}'; local_strategy = '{strategy}'; {keys}"
    trials = beside_baseline(asked, cores=cores, batch=batch)
    (found,) = [t for t in trials if t.launcher == launcher and t.local_strategy == strategy]
    return found


def transports(*trials: str) -> dict[str, str]:
    """The transport of each trial beside the baseline; keys are lines with `;` between them."""
    planned = beside_baseline(*trials[:-1], trials[-1] + INTERFACE)
    return {f"{t.launcher}/{t.local_strategy}": t.transport for t in planned if not t.is_baseline}


MPI = 'launcher = "mpi"; local_strategy = "sequential"; nodes = 2'
SPARK = 'launcher = "spark"; local_strategy = "sequential"; nodes = 2'


@pytest.mark.parametrize(
    ("trials", "expected"),
    [
        ([MPI], ["mpi"]),
        ([MPI, SPARK], ["gloo", "gloo"]),
        ([MPI, SPARK.replace("nodes = 2", "nodes = 4")], ["mpi", "gloo"]),
        ([MPI, f'{SPARK}; transport = "mpi"'], ["mpi", "mpi"]),
        # a key that only one transport has; then nothing is common
        ([f'{MPI}; algorithm = "ring"', SPARK], ["mpi", "gloo"]),
        # other strategies on as many nodes are compared, too
        ([MPI.replace("sequential", "intraop") + "; threads_per_rank = 2", SPARK], ["gloo"] * 2),
        # on one node the strategy decides, and launchers alone change nothing
        (
            [
                f'launcher = "{name}"; local_strategy = "sharded"'
                for name in ("mpi", "spark", "local")
            ],
            ["paceline"] * 3,
        ),
        (
            [
                'launcher = "mpi"; local_strategy = "processes"',
                'launcher = "mpi"; local_strategy = "parameter-server"',
                'launcher = "spark"; local_strategy = "parameter-server"',
            ],
            ["shared", "gloo", "gloo"],
        ),
    ],
)
def test_trials_on_as_many_nodes_have_one_default_transport(trials, expected) -> None:
    assert sorted(transports(*trials).values()) == sorted(expected)


INTERFACE = "; [network]; interface = 'eth0'"
NODES = "; nodes = 2" + INTERFACE


@pytest.mark.parametrize(
    ("way", "keys", "cores", "name"),
    [
        # what "auto" takes, and never less than two
        ("local/threads", "", 4, "none.threads.n1r1t4.fp32.k4"),
        ("local/threads", "", 1, "none.threads.n1r1t2.fp32.k2"),
        ("local/processes", "threads_per_rank = 2", 8, "shared.processes.n1r4t2.fp32"),
        ("local/pipeline", "", 4, "shared.pipeline.n1r4t1.fp32.s4m16-1f1b-time"),
        ("local/pipeline", "threads_per_rank = 2", 4, "shared.pipeline.n1r2t2.fp32.s2m8-1f1b-time"),
        ("local/hybrid", "", 8, "shared.hybrid.n1r8t1.fp32.s2m6-1f1b-time"),
        ("local/hybrid", "", 2, "shared.hybrid.n1r4t1.fp32.s2m8-1f1b-time"),
        # what follows from the numbers given
        ("local/threads", "threads_per_rank = 3", 8, "none.threads.n1r1t3.fp32.k3"),
        ("local/threads", "replicas = 2", 8, "none.threads.n1r1t2.fp32.k2"),
        ("local/threads", "replicas = 2; threads_per_rank = 4", 8, "none.threads.n1r1t4.fp32.k2"),
        ("local/processes", "replicas = 3", 8, "shared.processes.n1r3t1.fp32"),
        ("local/pipeline", "ranks_per_node = 3", 8, "shared.pipeline.n1r3t1.fp32.s3m12-1f1b-time"),
        ("local/hybrid", "ranks_per_node = 4", 8, "shared.hybrid.n1r4t1.fp32.s2m8-1f1b-time"),
        (
            "local/hybrid",
            "ranks_per_node = 6; replicas = 2",
            8,
            "shared.hybrid.n1r6t1.fp32.s3m12-1f1b-time",
        ),
        (
            "local/pipeline",
            "split_points = [3, 9]; schedule = 'gpipe'; micro_batches = 5",
            8,
            "shared.pipeline.n1r3t1.fp32.s3m5-gpipe-c3c9",
        ),
        (
            "local/pipeline",
            "stages = 2; balance = 'size'",
            8,
            "shared.pipeline.n1r2t1.fp32.s2m8-1f1b-size",
        ),
        # transports and reductions
        ("mpi/processes", "", 4, "shared.processes.n1r4t1.fp32"),
        ("mpi/processes", "transport = 'mpi'", 4, "mpi.processes.n1r4t1.fp32"),
        ("spark/hybrid", "", 4, "shared.hybrid.n1r4t1.fp32.s2m8-1f1b-time"),
        ("mpi/sequential", NODES, 4, "mpi.sequential.n2r1t1.fp32"),
        ("spark/sequential", NODES, 4, "gloo.sequential.n2r1t1.fp32"),
        ("spark/threads", "replicas = 2" + NODES, 4, "gloo.threads.n2r1t2.fp32.k2"),
        ("mpi/processes", "replicas = 2" + NODES, 4, "mpi.processes.n2r2t1.fp32.hierarchical"),
        (
            "mpi/processes",
            "replicas = 2; reduction = 'zero-1'" + NODES,
            4,
            "mpi.processes.n2r2t1.fp32.zero-1",
        ),
        (
            "spark/processes",
            "replicas = 2; reduction = 'flat'" + NODES,
            4,
            "gloo.processes.n2r2t1.fp32.flat",
        ),
        ("mpi/hybrid", "replicas = 2" + NODES, 4, "mpi.hybrid.n2r4t1.fp32.s2m6-1f1b-time"),
        # GPUs
        ("mpi/processes", "replicas = 2; device = 'cuda'", 4, "nccl.processes.n1r2t1.fp32.cuda"),
        (
            "mpi/processes",
            "replicas = 2; device = 'cuda'" + NODES,
            4,
            "nccl.processes.n2r2t1.fp32.flat.cuda",
        ),
        (
            "mpi/pipeline",
            "stages = 2; device = 'cuda'" + NODES,
            4,
            "gloo.pipeline.n2r2t1.fp32.s2m8-1f1b-time.cuda",
        ),
    ],
)
def test_what_is_not_said_follows_from_what_is_and_from_the_cores(way, keys, cores, name):
    trial = one(way, keys, cores=cores)
    assert trial.configuration == f"tiny.{trial.launcher}.{name}"
    assert Trial.model_validate_json(trial.model_dump_json()) == trial


def test_tables_tell_zero_1_from_a_whole_update_on_each_node():
    zero = one("mpi/processes", "replicas = 2; reduction = 'zero-1'" + NODES)
    whole = one("mpi/processes", "replicas = 2" + NODES)
    assert (zero.labels, zero.details, whole.labels) == (["zero-1"], [], [])


@pytest.mark.parametrize(
    ("way", "keys", "replicas", "threads_per_worker"),
    [
        ("local/threads", "replicas = 2; threads_per_rank = 6", 2, 3),
        ("spark/threads", "replicas = 3" + NODES, 6, 1),
        ("local/processes", "replicas = 4; threads_per_rank = 2", 4, 2),
        ("local/pipeline", "stages = 4; threads_per_rank = 2", 1, 2),
        ("mpi/hybrid", "replicas = 3; stages = 2" + NODES, 6, 1),
    ],
)
def test_replicas_are_of_all_nodes_and_have_their_own_threads(
    way, keys, replicas, threads_per_worker
):
    trial = one(way, keys)
    assert (trial.placement.replicas, trial.placement.threads_per_worker) == (
        replicas,
        threads_per_worker,
    )


def test_batch_is_shared_by_replicas_not_by_ranks():
    assert one("local/pipeline", "stages = 5", batch=32).placement.ranks == 5
    with pytest.raises(UsageError, match="32 cannot be divided among 5 replicas"):
        one("local/hybrid", "stages = 2; replicas = 5", batch=32)
    place = one("local/hybrid", "stages = 2", cores=10, batch=32).placement
    assert (place.replicas, place.ranks) == (4, 8)


def test_model_has_only_so_many_stages():
    assert one("local/pipeline", cores=16).placement.stages == 13
    with pytest.raises(UsageError, match="tiny-alexnet has at most 13, got 16"):
        one("local/pipeline", "stages = 16")


def test_micro_batches_are_no_more_than_a_replica_has_samples():
    assert one("local/hybrid", "replicas = 3", batch=6).option("micro_batches") == 2
    with pytest.raises(UsageError, match=r"is 3 sample\(s\), expected at most as many, got 4"):
        one("local/hybrid", "micro_batches = 4; replicas = 8", batch=24)
    place = one("local/hybrid", "micro_batches = 4", cores=16, batch=24).placement
    assert place.replicas == 6


@pytest.mark.parametrize(
    ("keys", "cores", "budget", "cores_per_node"),
    [
        ("replicas = 2; oversubscribe = true", 2, 2, 2),
        ("replicas = 2; oversubscribe = true", 4, None, 4),
        ("replicas = 2", 2, None, 4),  # refused before it starts
    ],
)
def test_ranks_that_share_cores_are_given_those_of_the_node(keys, cores, budget, cores_per_node):
    place = one("local/hybrid", keys, cores=cores).placement
    assert (place.allocated_cores, place.cores_per_node) == (budget, cores_per_node)


def test_cores_that_ranks_of_other_nodes_share_are_not_known():
    place = one("mpi/hybrid", "replicas = 2; oversubscribe = true" + NODES, cores=2).placement
    assert place.allocated_cores is None


def test_trials_that_only_differ_in_words_are_refused():
    again = "[[trials]]; launcher = 'mpi'; local_strategy = 'processes'; replicas = 4"
    with pytest.raises(UsageError) as raised:
        one("mpi/processes", "ranks_per_node = 4; " + again)
    assert "trials[3], workload tiny: with all defaults filled in it is" in str(raised.value)


@pytest.mark.parametrize("cores", [2, 16])
def test_shipped_matrix_is_every_strategy_under_every_launcher(cores):
    trials = plan_trials(load_spec("strategies")[0], {"tiny": "/data"}, cores)
    strategies = {"sequential", "intraop", "threads", "processes", "pipeline", "hybrid"}
    assert {(t.launcher, t.local_strategy) for t in trials} == {
        (launcher, strategy) for launcher in ("local", "mpi", "spark") for strategy in strategies
    }
    assert len(trials) == 18 * 5
    assert {t.placement.cores for t in trials if t.local_strategy != "sequential"} <= {2, 4}
    assert all(t.placement.cores <= cores for t in trials)


def test_trial_runs_the_workloads_that_it_names():
    text = (
        SPEC + "[[trials]]\nlauncher = 'spark'\nlocal_strategy = 'threads'\nworkloads = ['tiny']\n"
    )
    trials = plan_trials(parse_spec(text, "test"), DATA, 4)
    assert {t.training.workload for t in trials if t.launcher == "spark"} == {"tiny"}
    assert len(trials) == 3 * 7


@pytest.mark.parametrize(
    ("way", "keys"), [("mpi/best", "[tune]"), ("mpi/hybrid", "nodes = 2" + INTERFACE + "; [tune]")]
)
def test_what_a_search_is_to_find_has_to_be_found_before_it_is_planned(way, keys):
    with pytest.raises(UsageError, match=r"run `paceline tune local SPEC`"):
        one(way, keys)


WORKERS = 'launcher = "local"; local_strategy = "processes"; ranks_per_node = '


def _batches(*trials: str, cores: int = 4, workload: str = 'name = "tiny"', training: str) -> list:
    text = spec_text(*trials, workload=workload, tables=f"[training]; {training}", repeats=2)
    found = plan_trials(parse_spec(text, "test"), DATA, cores)
    return sorted({(t.configuration, t.training.global_batch) for t in found})


def test_global_batch_grows_with_the_replicas_and_each_has_a_baseline():
    found = _batches(f"{WORKERS}2", f"{WORKERS}4", training="max_steps = 8; batch_per_replica = 8")
    assert found == [
        ("tiny-batch16.local.none.sequential.n1r1t1.fp32", 16),
        ("tiny-batch16.local.shared.processes.n1r2t1.fp32", 16),
        ("tiny-batch32.local.none.sequential.n1r1t1.fp32", 32),
        ("tiny-batch32.local.shared.processes.n1r4t1.fp32", 32),
        ("tiny-batch8.local.none.sequential.n1r1t1.fp32", 8),
    ]


def test_replicas_of_all_nodes_and_of_the_cores_count():
    nodes = 'launcher = "mpi"; local_strategy = "sequential"; nodes = 3'
    threads = 'launcher = "local"; local_strategy = "threads"'
    keys = 'max_steps = 8; batch_per_replica = 5; [network]; interface = "eth0"'
    found = _batches(nodes, threads, cores=4, training=keys)
    assert sorted({batch for _, batch in found}) == [5, 15, 20]


def test_every_trial_has_every_batch_of_a_list():
    found = _batches(f"{WORKERS}2", training="max_steps = 8; global_batch = [8, 16]")
    assert [(name.split(".")[3], batch) for name, batch in found] == [
        ("sequential", 16), ("processes", 16), ("sequential", 8), ("processes", 8),
    ]  # fmt: skip


def test_training_of_a_batch_names_its_entry_and_scales_its_learning_rate():
    keys = (
        "max_steps = 8; batch_per_replica = 8; learning_rate = 0.1; reference_batch = 8; "
        'learning_rate_scaling = "linear"'
    )
    text = spec_text(f"{WORKERS}2", tables=f"[training]; {keys}")
    trainings = [t.training for t in plan_trials(parse_spec(text, "test"), DATA, 4)]
    found = {(t.workload, t.entry_name, t.batch_per_replica, t.learning_rate) for t in trainings}
    assert found == {("tiny-batch8", "tiny", 8, 0.1), ("tiny-batch16", "tiny", 8, 0.2)}
    assert {t.dataset for t in trainings} == {"/data/tiny"}


def test_batch_of_a_workload_comes_before_the_kind_of_batch_of_the_file():
    keys = "max_steps = 8; batch_per_replica = 8"
    found = _batches(f"{WORKERS}2", workload='name = "tiny"; global_batch = 6', training=keys)
    assert {(name.split(".")[0], batch) for name, batch in found} == {("tiny", 6)}
