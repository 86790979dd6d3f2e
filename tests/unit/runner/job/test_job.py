"""From a job script's arguments to the trial that they describe."""

import json
import os

import pytest
from tests.support.job_specs import job_words
from tests.support.specs import spec_text

from paceline.base.errors import EnvironmentLacks, UsageError
from paceline.runner.job import job as module
from paceline.runner.job.job import (
    check_not_alone,
    check_world,
    parse_arguments,
    parse_job,
    read_trial,
)
from paceline.train.data.catalogue import dataset_path

MPI = 'launcher = "mpi"; local_strategy = "processes"; ranks_per_node = 2; oversubscribe = true'
OVER_GLOO = "tiny.mpi.gloo.processes.n1r2t1.fp32"


@pytest.fixture
def parse(tmp_path):
    def make(*words, launcher="mpi", vary_seed=False):
        trials = [f'{MPI}; transport = "{transport}"' for transport in ("gloo", "mpi")]
        workload = f'name = "tiny"; data = "{tmp_path}"'
        keys = {"name": "three", "seed": 5, "repeats": 2, "vary_seed": vary_seed}
        spec = tmp_path / "spec.toml"
        spec.write_text(spec_text(*trials, workload=workload, **keys))
        out = [] if "--trial" in words else [str(spec), "--out", str(tmp_path / "run")]
        return parse_job(launcher, "train.py", [*out, *map(str, words)])

    return make


def test_trial_of_a_spec_is_the_one_that_the_pattern_names(parse, tmp_path):
    job = parse("--only", "*.gloo.*")
    assert job.trial.id == f"{OVER_GLOO}.r0"
    assert (job.trial.training.seed, job.trial.training.dataset) == (5, str(tmp_path))
    assert job.trial.experiment == "three"
    assert job.files.root == tmp_path / "run" / "trials" / job.trial.id
    assert not job.supervised


def test_only_trial_of_the_launcher_needs_no_pattern(parse):
    assert parse(launcher="local").trial.local_strategy == "sequential"


def test_changes_of_the_spec_reach_the_trial(parse):
    words = ("--set", "training.max_steps=9", "--set", 'network.interface="eth9"')
    trial = parse("--only", "*.gloo.*", *words).trial
    assert (trial.training.max_steps, trial.interface) == (9, "eth9")


@pytest.mark.parametrize(("vary_seed", "seed"), [(False, 5), (True, 12)])
def test_repeat_may_be_beyond_those_of_the_spec(parse, vary_seed, seed):
    trial = parse("--only", "*.gloo.*", "--repeat", "7", vary_seed=vary_seed).trial
    assert (trial.repeat, trial.id, trial.training.seed) == (7, f"{OVER_GLOO}.r7", seed)


def test_shipped_experiment_reads_its_synthetic_data_set(tmp_path):
    words = ["quickstart", "--only", "*.mpi.gloo.*", "--out", str(tmp_path)]
    trial = parse_job("mpi", "train.py", words).trial
    assert trial.experiment == "quickstart"
    assert trial.training.dataset == str(dataset_path("tiny", images=192, seed=1))


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ((), "expected a pattern of one configuration, '\\*' matches:\n  - tiny"),
        (("--only", "*.spark.*"), "--only: no configuration matches '\\*.spark.\\*'"),
        (("--only", "*.gloo.*", "--repeat", "-1"), "--repeat: expected 0 or more, got -1"),
        (("--set", "training.epochs=0"), "training.epochs"),
        (("--epochs", "3"), r"train\.py: unrecognized arguments.*see --help"),
        (("--repeat", "x"), r"train\.py: argument --repeat: .*see --help"),
    ],
)
def test_wrong_arguments_are_usage_errors(parse, words, complaint):
    with pytest.raises(UsageError, match=complaint):
        parse(*words)


def test_launcher_without_a_trial_is_refused(parse):
    with pytest.raises(UsageError, match=r'with launcher "spark", found none.*local, mpi'):
        parse(launcher="spark")


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ([], "a spec or --trial TRIAL_JSON, and not both"),
        (["quickstart", "--trial", "trial.json"], "a spec or --trial TRIAL_JSON, and not both"),
        (["quickstart"], "expected --out RUN_DIR"),
    ],
)
def test_what_is_missing_is_named(words, complaint):
    with pytest.raises(UsageError, match=complaint):
        parse_job("mpi", "train.py", words)


def test_all_faults_are_reported_at_once(parse):
    with pytest.raises(UsageError) as caught:
        parse("--set", 'training.precision="x"', "--set", "training.epochs=0")
    assert "precision" in str(caught.value)
    assert "epochs" in str(caught.value)


def test_cores_of_a_rank_that_mpirun_bound_are_not_taken_for_the_nodes(tmp_path, monkeypatch):
    cores = {os.getpid(): {0}, 1: {0, 1}}
    monkeypatch.setattr(module, "launching_pid", lambda: 1)
    monkeypatch.setattr(module.os, "sched_getaffinity", cores.__getitem__)
    keys = {"local_strategy": "hybrid", "ranks_per_node": 4, "oversubscribe": True}
    words = job_words(tmp_path, "mpi", data=tmp_path, **keys)
    place = parse_job("mpi", "train.py", [*words, "--out", str(tmp_path)]).trial.placement
    assert place.allocated_cores == 2


def test_other_numbers_of_ranks_or_nodes_are_refused(parse):
    trial = parse("--only", "*.gloo.*").trial
    check_world(trial, 2)
    with pytest.raises(UsageError, match=r"expected 2 ranks on 1 .* the launcher started 3 on 1"):
        check_world(trial, 3)
    with pytest.raises(UsageError, match=r"expected 2 ranks on 1 .* the launcher started 2 on 2"):
        check_world(trial, 2, nodes=2)


@pytest.fixture
def trial_file(parse, tmp_path):
    trial = parse("--only", "*.gloo.*").trial
    path = tmp_path / "trials" / trial.id / "trial.json"
    path.parent.mkdir(parents=True)
    path.write_text(trial.model_dump_json())
    return path


def test_trial_file_is_read_as_it_was_written(parse, trial_file):
    job = parse("--trial", trial_file)
    assert job.trial == parse("--only", "*.gloo.*").trial
    assert job.files.root == trial_file.parent
    assert job.supervised


def test_trial_file_allows_no_change(parse, trial_file):
    words = ("--only", "*", "--set", "seed=4", "--repeat", "1")
    with pytest.raises(UsageError, match="leave out --only, --set, --repeat"):
        parse("--trial", trial_file, *words)


def test_trial_file_with_out_is_kept_in_that_run_directory(parse, trial_file, tmp_path):
    job = parse("--trial", trial_file, "--out", tmp_path / "other", "--repeat", 3)
    assert not job.supervised
    assert (job.trial.repeat, job.trial.id[-3:]) == (3, ".r3")
    assert job.trial.training.seed == 5
    assert job.files.root == tmp_path / "other" / "trials" / job.trial.id


def test_trial_file_of_another_launcher_is_refused(parse, trial_file):
    with pytest.raises(UsageError, match='for launcher "mpi", this is "spark"'):
        parse("--trial", trial_file, launcher="spark")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"every_steps": 7, "every_s": None, "mtbf_s": None, "keep": True}, (7, True)),
        ({"every_steps": 7, "every_s": "auto", "mtbf_s": 60.0, "keep": False}, (7, False)),
        ({"every_steps": None, "every_s": 2.0, "mtbf_s": None, "keep": False}, None),
    ],
)
def test_trial_of_0_3_with_seconds_between_checkpoints_can_be_read(
    make_trial, tmp_path, given, expected
):
    path = tmp_path / "trial.json"
    path.write_text(json.dumps({**make_trial().model_dump(mode="json"), "checkpoint": given}))
    found = read_trial(path).checkpoint
    assert (None if found is None else (found.every_steps, found.keep)) == expected


def test_file_that_is_no_trial_is_refused(tmp_path):
    path = tmp_path / "trial.json"
    path.write_text("{}")
    with pytest.raises(UsageError, match="expected a trial"):
        read_trial(path)
    with pytest.raises(UsageError, match="expected a readable file"):
        read_trial(tmp_path / "none.json")


def test_words_are_not_abbreviated():
    with pytest.raises(UsageError, match="unrecognized arguments: --tria"):
        parse_arguments("train.py", ["--tria", "x"])


@pytest.mark.parametrize(
    "environment",
    [{"SLURM_NTASKS": "4"}, {"OMPI_COMM_WORLD_SIZE": "4"}, {"PMI_SIZE": "4", "SLURM_NTASKS": "1"}],
)
def test_singleton_that_was_to_be_one_of_four_is_refused(environment):
    with pytest.raises(EnvironmentLacks, match="expected 4 ranks"):
        check_not_alone(1, 4, environment)


@pytest.mark.parametrize(
    ("world_size", "planned", "environment"),
    [
        (1, 4, {}),
        (4, 4, {"SLURM_NTASKS": "4"}),
        (1, 1, {"SLURM_NTASKS": "4"}),  # planned to be alone
        (1, 4, {"OMPI_COMM_WORLD_SIZE": "1", "SLURM_NTASKS": "4"}),  # mpirun -n 1 in a job
    ],
)
def test_rank_that_may_be_alone_is_let_be(world_size, planned, environment):
    check_not_alone(world_size, planned, environment)


def test_records_at_a_url_are_refused_with_the_command_that_can_write_them(parse, tmp_path):
    url = "hdfs://h:8020/run"
    expected = f"--out {url}: expected a folder that all nodes see"
    with pytest.raises(UsageError, match=expected) as caught:
        parse("--only", "*.gloo.*", "--set", "seed=4", "--out", url)
    command = f"paceline run {tmp_path}/spec.toml --only {OVER_GLOO} --set seed=4 --out {url}"
    assert str(caught.value).endswith(f": {command}")


def test_trial_at_a_url_is_refused_with_its_configuration(parse, trial_file):
    with pytest.raises(UsageError, match=rf": paceline run SPEC --only {OVER_GLOO} --out s3://b/r"):
        parse("--trial", trial_file, "--out", "s3://b/r")
