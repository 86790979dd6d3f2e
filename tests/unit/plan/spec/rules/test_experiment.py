"""Rules for [tune], and for the keys of the whole file."""

from __future__ import annotations

import pytest
from tests.support.specs import spec_text, trials_text

from paceline.base.errors import UsageError
from paceline.plan.spec.loading import load_spec, parse_spec

SPEC = spec_text('launcher = "mpi"; local_strategy = "best"')


def fault_of(text):
    with pytest.raises(UsageError) as raised:
        parse_spec(text, "mine.toml")
    return str(raised.value)


@pytest.mark.parametrize(
    "line",
    [
        "steps = 0",
        "warmup_steps = 0",
        "repeats = 0",
        "timeout_s = 0",
        "strategies = []",
    ],
)
def test_values_that_leave_nothing_to_search_are_refused(line):
    assert f"tune.{line.split()[0]}" in fault_of(SPEC + f"[tune]\n{line}\n")


def test_strategy_to_search_must_be_one():
    assert "tune.strategies[1]" in fault_of(SPEC + '[tune]\nstrategies = ["best"]\n')


SENDS = trials_text(
    'launcher = "mpi"; transport = "mpi"; local_strategy = "processes"; ranks_per_node = 2'
)
ONE_PROCESS = SPEC.replace('"best"', '"intraop"')


def test_lists_of_what_is_tried_are_read():
    tune = """
buckets_mb = [1, 2.5, "model"]
buckets_in_flight = [2, "unbounded"]
bucket_waits_ms = [1, 3.5]
algorithms = ["ring"]
compressions = ["bf16", "topk"]
mpi_parameters = [{btl_tcp_sndbuf = "1048576", btl_tcp_rcvbuf = "1048576"}, {smsc = "^cma"}]
"""
    found = parse_spec(SPEC + SENDS + "[tune]" + tune, "mine.toml").tune
    assert found.buckets_mb == (1, 2.5, "model")
    assert found.buckets_in_flight == (2, "unbounded")
    assert found.bucket_waits_ms == (1, 3.5)
    assert found.algorithms == ("ring",)
    assert found.compressions == ("bf16", "topk")
    assert found.mpi_parameters == (
        {"btl_tcp_sndbuf": "1048576", "btl_tcp_rcvbuf": "1048576"},
        {"smsc": "^cma"},
    )


@pytest.mark.parametrize(
    ("line", "place"),
    [
        ("buckets_mb = [0]", "tune.buckets_mb[1]: input should be greater than 0"),
        ('buckets_mb = ["whole"]', "tune.buckets_mb[1]: "),
        ("buckets_in_flight = [1, 0]", "tune.buckets_in_flight[2]: input should be"),
        ("bucket_waits_ms = [0]", "tune.bucket_waits_ms[1]: input should be greater than 0"),
        ('algorithms = ["rings"]', "tune.algorithms[1]: expected one of"),
        ('compressions = ["zip"]', "tune.compressions[1]: expected one of"),
        ("mpi_parameters = [{}]", "tune.mpi_parameters[1]: "),
        ("mpi_parameters = [{smsc = 1}]", "tune.mpi_parameters[1].smsc: "),
    ],
)
def test_value_that_cannot_be_tried_is_refused_with_its_place(line, place):
    assert place in fault_of(SPEC + SENDS + f"[tune]\n{line}\n")


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("buckets_mb = [5]", "bucket_mb"),
        ("buckets_in_flight = [2]", "buckets_in_flight"),
        ("bucket_waits_ms = [2]", "bucket_wait_ms"),
        ('algorithms = ["ring"]', "algorithm"),
        ('compressions = ["bf16"]', "compression"),
        ('mpi_parameters = [{smsc = "^cma"}]', "mpi_parameters"),
    ],
)
def test_list_that_no_trial_has_a_use_for_is_refused(line, told):
    fault = fault_of(ONE_PROCESS + f"[tune]\n{line}\n")
    assert f"tune.{line.split()[0]}: expected a trial that can use {told}, found none" in fault
    parse_spec(ONE_PROCESS + SENDS + f"[tune]\n{line}\n", "mine.toml")


def test_empty_list_leaves_out_what_nobody_could_use():
    assert parse_spec(ONE_PROCESS + "[tune]\nalgorithms = []\n", "mine.toml").tune.algorithms == ()


def test_patterns_and_a_search_exclude_each_other():
    with pytest.raises(UsageError, match="paceline tune local SPEC"):
        load_spec("quickstart", ['only=["*"]', "tune.repeats=2"])


def test_automatic_repeats_and_their_keys():
    changed = load_spec("quickstart", ['repeats="auto"', "max_repeats=6", "limits.run_s=60"])
    assert changed.experiment.planned_repeats == 6
    assert load_spec("quickstart").experiment.planned_repeats == 5
    with pytest.raises(UsageError) as raised:
        load_spec("transports", ["max_repeats=5", "limits.run_s=60", "tie_margin=0.1"])
    message = str(raised.value)
    assert "3 faults" in message
    assert 'max_repeats: applies to repeats = "auto" only, got repeats = 5' in message
    fixed = load_spec("quickstart", ["repeats=2"]).experiment
    assert (fixed.repeats, fixed.max_repeats) == (2, 8)
    with pytest.raises(UsageError, match="max_repeats: applies to"):
        load_spec("quickstart", ["repeats=2", "max_repeats=6"])
    with pytest.raises(UsageError, match="repeats: "):
        load_spec("quickstart", ['repeats="often"'])


TWO = 'launcher = "local"; local_strategy = "processes"; ranks_per_node = 2'


def test_batch_per_replica_excludes_a_global_batch_of_the_same_table():
    fault = fault_of(spec_text(tables="[training]; batch_per_replica = 8; global_batch = 16"))
    assert "training: expected global_batch or batch_per_replica, got global_batch = 16" in fault
    fault = fault_of(spec_text(workload='name = "tiny"; batch_per_replica = 8; global_batch = [4]'))
    assert "workloads[1]: expected global_batch or batch_per_replica" in fault
    nearer = spec_text(workload='name = "tiny"; batch_per_replica = 8', tables="[training]; "
                       "global_batch = 16; max_steps = 8")  # fmt: skip
    parse_spec(nearer, "mine.toml")


@pytest.mark.parametrize(
    ("batches", "fault"),
    [
        ("[8, 8]", "training.global_batch: expected each batch once, got [8, 8]"),
        ("[8, 0]", "training.global_batch[2]: input should be greater than or equal to 1, got 0"),
        ("[8, 9]", "a global batch of 9 cannot be divided among 2 replicas"),
    ],
)
def test_faults_of_several_global_batches_are_those_of_each(batches, fault):
    text = fault_of(spec_text(TWO, tables=f"[training]; max_steps = 8; global_batch = {batches}"))
    assert text.count("\n  - ") == 1
    assert fault in text


def test_steps_are_counted_with_each_known_batch():
    keys = "[training]; epochs = 1; batch_per_replica = 10; warmup_steps = 1"
    text = fault_of(spec_text(TWO, workload='name = "tiny"; samples = 20', tables=keys))
    assert "warmup_steps = 1 leaves nothing to measure of 1 steps" in text
    assert text.count("\n  - ") == 1


def test_workload_cannot_have_the_name_of_a_batch_of_another():
    workload = 'name = "tiny"; batch_per_replica = 8; [[workloads]]; name = "tiny-batch16"; task = '
    fault = fault_of(spec_text(workload=workload + '"a.py:B"'))
    assert 'workloads: "tiny-batch16" is the name of a training of "tiny"' in fault


@pytest.mark.parametrize("batch", ["global_batch = [8, 16]", "batch_per_replica = 8"])
def test_search_refuses_several_global_batches(batch):
    fault = fault_of(spec_text(tables=f"[training]; max_steps = 8; {batch}; [tune]; steps = 4"))
    assert "tune: a search compares settings that train one global batch, expected a" in fault
    assert f"got {batch}" in fault
