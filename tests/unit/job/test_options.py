"""From a job script's arguments to the trial that they mean."""

import os

import pytest

from paceline.errors import EnvironmentLacks, UsageError
from paceline.job import trial as module
from paceline.job.options import parse_options
from paceline.job.trial import asked_ranks, check_not_alone, check_world_size, job_of
from paceline.spec.tables import Target


def options(*words: object):
    return parse_options("train.py", [str(word) for word in words])


@pytest.fixture
def by_hand(tmp_path):
    def make(*words: object):
        return options("--workload", "tiny", "--data", tmp_path, "--out", tmp_path / "run", *words)

    return make


def test_defaults_are_those_of_a_spec(by_hand, tmp_path):
    job = job_of(by_hand(), "mpi", nodes=1, ranks_per_node=2)
    trial = job.trial
    assert trial.id == "tiny.mpi.shared.processes.n1r2t1.fp32.r0"
    assert trial.training.dataset == str(tmp_path)
    assert trial.training.global_batch == 32
    assert trial.training.learning_rate == 0.01
    assert trial.training.dropout
    assert trial.telemetry.enabled
    assert job.files.root == tmp_path / "run" / "trials" / trial.id
    assert not job.supervised


def test_every_option_reaches_the_trial(by_hand):
    words = (
        "--global-batch 12 --epochs 3 --max-steps 9 --warmup-steps 2 --image-size 96 "
        "--precision bf16 --memory-format channels_last --learning-rate 0.5 --momentum 0.25 "
        "--no-dropout --reading stream --seed 7 --repeat 4 --interface eth9 --bucket-mb 5 "
        "--oversubscribe --telemetry-interval 2.5 --no-sidecar --trial-timeout 11 "
        "--collective-timeout 12 --rendezvous-timeout 13 --threads-per-rank 2 --transport gloo "
        "--local-strategy processes --reduction flat --name mine --held-out-samples 5 "
        '--target {"metric":"loss","at_most":1.5}'
    )
    trial = job_of(by_hand(*words.split()), "mpi", nodes=2, ranks_per_node=3).trial
    training = trial.training
    assert training.target == Target(metric="loss", at_most=1.5)
    assert (training.global_batch, training.epochs, training.max_steps) == (12, 3, 9)
    assert (training.warmup_steps, training.image_size, training.precision) == (2, 96, "bf16")
    assert (training.memory_format, training.learning_rate) == ("channels_last", 0.5)
    assert (training.momentum, training.dropout, training.reading) == (0.25, False, "stream")
    assert training.seed == 7
    assert (trial.repeat, trial.interface, trial.option("bucket_mb")) == (4, "eth9", 5.0)
    assert (trial.telemetry.interval_s, trial.telemetry.enabled) == (2.5, False)
    assert (trial.limits.trial_s, trial.limits.collective_s, trial.limits.rendezvous_s) == (
        11.0, 12.0, 13.0,
    )  # fmt: skip
    place = trial.placement
    assert (place.nodes, place.ranks_per_node, place.threads_per_rank) == (2, 3, 2)
    assert place.oversubscribe
    assert (trial.transport, trial.experiment) == ("gloo", "mine")
    assert trial.id.endswith(".b5.r4")


def test_settings_of_the_sidecar_reach_the_trial(by_hand):
    words = (
        "--telemetry-listen-host 0.0.0.0 --telemetry-listen-port -1 --telemetry-targets-dir /all "
        "--telemetry-textfile-dir /text --telemetry-tls-certificate /c --telemetry-tls-key /k "
        "--telemetry-tls-client-ca /ca --telemetry-bearer-token-file /token"
    )
    telemetry = job_of(by_hand(*words.split()), "mpi", nodes=1, ranks_per_node=2).trial.telemetry
    assert (telemetry.listen_host, telemetry.listen_port) == ("0.0.0.0", -1)
    assert (telemetry.targets_dir, telemetry.textfile_dir) == ("/all", "/text")
    assert (telemetry.tls_certificate, telemetry.tls_key) == ("/c", "/k")
    assert (telemetry.tls_client_ca, telemetry.bearer_token_file) == ("/ca", "/token")


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        ("--telemetry-listen-port 65536", "telemetry.listen_port"),
        ("--telemetry-tls-key /k", "tls_certificate and tls_key go together"),
        ("--telemetry-tls-client-ca /ca", "tls_client_ca needs tls_certificate"),
        (
            "--telemetry-basic-auth-file /a --telemetry-bearer-token-file /t",
            "basic_auth_file or bearer_token_file, got both",
        ),
    ],
)
def test_settings_of_the_sidecar_follow_the_rules_of_a_spec(words, fault, by_hand):
    with pytest.raises(UsageError, match=fault):
        job_of(by_hand(*words.split()), "mpi", nodes=1, ranks_per_node=2)


@pytest.mark.parametrize(
    ("launcher", "ranks", "words", "strategy", "transport"),
    [
        ("local", 1, "", "sequential", "none"),
        ("local", 1, "--threads-per-rank 2", "intraop", "none"),
        ("local", 2, "", "processes", "shared"),
        ("mpi", 1, "", "sequential", "none"),
        ("mpi", 2, "", "processes", "shared"),
        ("spark", 2, "", "processes", "shared"),
    ],
)
def test_strategy_and_transport_follow_from_ranks(
    launcher, ranks, words, strategy, transport, by_hand
):
    trial = job_of(by_hand(*words.split()), launcher, nodes=1, ranks_per_node=ranks).trial
    assert (trial.local_strategy, trial.transport) == (strategy, transport)


@pytest.mark.parametrize(
    ("launcher", "nodes", "ranks", "words", "name"),
    [
        ("mpi", 1, 4, "hybrid --stages 2", "shared.hybrid.n1r4t1.fp32.s2m8-1f1b-time"),
        ("mpi", 1, 6, "hybrid --replicas 2", "shared.hybrid.n1r6t1.fp32.s3m12-1f1b-time"),
        (
            "spark",
            1,
            3,
            "pipeline --split-points 3,9 --schedule gpipe --micro-batches 2",
            "shared.pipeline.n1r3t1.fp32.s3m2-gpipe-c3c9",
        ),
        (
            "torchrun",
            1,
            2,
            "pipeline --balance size",
            "shared.pipeline.n1r2t1.fp32.s2m8-1f1b-size",
        ),
        ("mpi", 1, 1, "threads --replicas 2", "none.threads.n1r1t2.fp32.k2"),
        (
            "mpi",
            2,
            2,
            "processes --reduction flat --interface eth0",
            "mpi.processes.n2r2t1.fp32.flat",
        ),
        (
            "mpi",
            1,
            2,
            "processes --device cuda --replicas 2",
            "nccl.processes.n1r2t1.fp32.cuda",
        ),
        ("local", 1, 1, "sequential --device cuda", "none.sequential.n1r1t1.fp32.cuda"),
    ],
)
def test_strategy_by_hand_takes_what_the_launcher_made(
    launcher, nodes, ranks, words, name, by_hand
):
    asked = by_hand("--global-batch", 24, "--local-strategy", *words.split())
    trial = job_of(asked, launcher, nodes=nodes, ranks_per_node=ranks).trial
    assert trial.configuration == f"tiny.{launcher}.{name}"


@pytest.mark.parametrize(
    ("words", "ranks", "strategy"),
    [
        ("", 1, "sequential"),
        ("--threads-per-rank 2", 1, "intraop"),
        ("--ranks 2", 2, "processes"),
        ("--ranks-per-node 4", 4, "processes"),
        ("--local-strategy processes", 8, "processes"),
        ("--local-strategy processes --replicas 2", 2, "processes"),
        ("--local-strategy threads --replicas 2", 1, "threads"),
        ("--local-strategy pipeline --stages 2", 2, "pipeline"),
        ("--local-strategy hybrid --stages 2 --replicas 4", 8, "hybrid"),
    ],
)
def test_where_nobody_started_ranks_the_strategy_says_how_many(
    words, ranks, strategy, by_hand, monkeypatch
):
    monkeypatch.setattr(module, "_node_cores", lambda: 8)
    trial = job_of(by_hand(*words.split()), "local", nodes=1, ranks_per_node=None).trial
    assert (trial.placement.ranks, trial.local_strategy) == (ranks, strategy)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("--precision fp16", "precision: expected one of"),
        ("--global-batch 5", "a global batch of 5 cannot be divided among 2 replicas"),
        ("--transport tcp", "transport: expected one of"),
        ("--transport nccl", '"nccl" carries the memory of "cuda" devices'),
        ("--stages 2", 'stages: has no meaning for local_strategy "processes"'),
        ("--local-strategy pipeline --stages 3", "expected 3, got 2"),
        ("--image-size 8", "image_size: "),
        ("--max-steps 2 --warmup-steps 2", "leaves nothing to measure"),
        ("--repeat -1", "--repeat: expected 0 or more"),
        ("--local-strategy sequential", "one process per node, got 2"),
    ],
)
def test_wrong_values_are_refused_in_the_words_of_the_spec(words, complaint, by_hand):
    with pytest.raises(UsageError) as caught:
        job_of(by_hand(*words.split()), "mpi", nodes=1, ranks_per_node=2)
    assert complaint in str(caught.value)
    assert "trials[1]" not in str(caught.value)


def test_all_faults_are_told_at_once(by_hand):
    with pytest.raises(UsageError) as caught:
        job_of(by_hand("--precision", "x", "--epochs", 0), "mpi", nodes=1, ranks_per_node=2)
    assert "precision" in str(caught.value)
    assert "epochs" in str(caught.value)


def test_cores_of_a_rank_that_mpirun_bound_are_not_taken_for_the_nodes(by_hand, monkeypatch):
    cores = {os.getpid(): {0}, 1: {0, 1}}
    monkeypatch.setattr(module, "launching_pid", lambda: 1)
    monkeypatch.setattr(module.os, "sched_getaffinity", cores.__getitem__)
    words = ("--local-strategy", "hybrid", "--oversubscribe")
    place = job_of(by_hand(*words), "mpi", nodes=1, ranks_per_node=4).trial.placement
    assert place.allocated_cores == 2


def test_what_is_missing_is_named():
    with pytest.raises(UsageError, match="--workload, --data, --out"):
        job_of(options(), "mpi", nodes=1, ranks_per_node=2)


def test_every_key_of_a_trial_is_an_option():
    given = options(
        "--stages", "auto", "--split-points", "4,9", "--mpi-parameters", '{"btl": "self"}',
        "--no-dropout", "--oversubscribe",
    )  # fmt: skip
    assert given.tables == {
        "workloads": {"dropout": False},
        "trials": {
            "stages": "auto",
            "split_points": [4, 9],
            "mpi_parameters": {"btl": "self"},
            "oversubscribe": True,
        },
    }


@pytest.mark.parametrize(
    "words", ["--epochs many", "--no-such 1", "--epoch 1", "--split-points 4,x"]
)
def test_arguments_that_do_not_parse_are_a_usage_error(words):
    with pytest.raises(UsageError, match=r"train\.py: .*see --help"):
        options(*words.split())


def test_ranks_other_than_asked_are_refused_with_both_numbers(by_hand):
    with pytest.raises(EnvironmentLacks, match="expected 4 ranks, the launcher made 1"):
        job_of(by_hand("--ranks", 4), "mpi", nodes=1, ranks_per_node=1)
    with pytest.raises(EnvironmentLacks, match="expected 4 ranks"):
        check_world_size(4, 1)
    check_world_size(4, 4)


@pytest.fixture
def trial_file(by_hand, tmp_path):
    trial = job_of(by_hand("--seed", 3), "mpi", nodes=1, ranks_per_node=2).trial
    path = tmp_path / "trials" / trial.id / "trial.json"
    path.parent.mkdir(parents=True)
    path.write_text(trial.model_dump_json())
    return path


def test_trial_file_is_read_as_it_was_written(trial_file):
    asked = options("--trial", trial_file)
    job = job_of(asked, "mpi", nodes=1, ranks_per_node=2)
    assert job.trial.training.seed == 3
    assert job.files.root == trial_file.parent
    assert job.supervised
    assert asked_ranks(asked) == 2
    unstarted = job_of(asked, "mpi", nodes=1, ranks_per_node=None)
    assert unstarted.trial == job.trial


def test_trial_file_allows_no_other_key(trial_file):
    asked = options("--trial", trial_file, "--seed", 4, "--no-sidecar", "--global-batch", 8)
    with pytest.raises(UsageError, match="leave out --seed, --global-batch, --no-sidecar"):
        job_of(asked, "mpi", nodes=1, ranks_per_node=2)


def test_trial_file_with_out_is_kept_in_that_run_directory(trial_file, tmp_path):
    asked = options("--trial", trial_file, "--out", tmp_path / "other", "--repeat", 3)
    job = job_of(asked, "mpi", nodes=1, ranks_per_node=2)
    assert not job.supervised
    assert (job.trial.repeat, job.trial.id[-3:]) == (3, ".r3")
    assert job.trial.training.seed == 3
    assert job.files.root == tmp_path / "other" / "trials" / job.trial.id


def test_repeat_of_a_trial_file_needs_a_run_directory(trial_file):
    with pytest.raises(UsageError, match="leave out --repeat"):
        job_of(options("--trial", trial_file, "--repeat", 1), "mpi", ranks_per_node=2)


def test_trial_file_of_another_launcher_is_refused(trial_file):
    with pytest.raises(UsageError, match='for launcher "mpi", this is "spark"'):
        job_of(options("--trial", trial_file), "spark", nodes=1, ranks_per_node=2)


def test_trial_file_with_another_world_size_is_refused(trial_file):
    with pytest.raises(EnvironmentLacks, match="expected 2 ranks, the launcher made 1"):
        job_of(options("--trial", trial_file), "mpi", nodes=1, ranks_per_node=1)


def test_file_that_is_no_trial_is_refused(tmp_path):
    path = tmp_path / "trial.json"
    path.write_text("{}")
    with pytest.raises(UsageError, match="expected a trial"):
        asked_ranks(options("--trial", path))
    with pytest.raises(UsageError, match="expected a readable file"):
        asked_ranks(options("--trial", tmp_path / "none.json"))


@pytest.mark.parametrize(
    "environment",
    [{"SLURM_NTASKS": "4"}, {"OMPI_COMM_WORLD_SIZE": "4"}, {"PMI_SIZE": "4", "SLURM_NTASKS": "1"}],
)
def test_singleton_that_was_to_be_one_of_four_is_refused(environment):
    with pytest.raises(EnvironmentLacks, match="expected 4 ranks"):
        check_not_alone(1, None, environment)


@pytest.mark.parametrize(
    ("world_size", "asked", "environment"),
    [
        (1, None, {}),
        (4, None, {"SLURM_NTASKS": "4"}),
        (1, 1, {"SLURM_NTASKS": "4"}),  # said to be alone
        (1, None, {"OMPI_COMM_WORLD_SIZE": "1", "SLURM_NTASKS": "4"}),  # mpirun -n 1 in a job
    ],
)
def test_rank_that_may_be_alone_is_let_be(world_size, asked, environment):
    check_not_alone(world_size, asked, environment)
