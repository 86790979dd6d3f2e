"""Training scripts that know nothing of Paceline: one run with good ones and with faulty ones."""

from __future__ import annotations

import json
from pathlib import Path

import polars as pl
import pytest
from tests.functional.cli_runs import cli_in, trial
from tests.support.specs import spec_text

pytestmark = [pytest.mark.functional, pytest.mark.timeout(400)]

DDP = Path(__file__).parents[2] / "examples/scripts/ddp.py"
STATEMENTS = Path(__file__).parent / "programs/statements.py"
STEPS = 8
PHASES = ("data_wait", "forward", "backward", "comm", "pass_comm", "optimizer", "other")

TRAINING = """
import os
import torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range({steps}):
    model(torch.ones(2, 4)).sum().backward()
    {inside}
    optimizer.step()
"""
SCRIPTS = {
    "no_step": TRAINING.format(steps=0, inside="pass"),
    "alone": TRAINING.format(steps=3, inside="pass"),
    "fails": "import torch.distributed as dist\ndist.init_process_group('nccl')\n"
    + TRAINING.format(steps=3, inside="assert step < 1 or dist.get_world_size() == 1, 'too far'"),
}


@pytest.fixture(scope="module")
def run(tmp_path_factory, cache):
    """The finished process and the comparison of one run of all scripts."""
    folder = tmp_path_factory.mktemp("scripts")
    for name, text in SCRIPTS.items():
        (folder / f"{name}.py").write_text(text, "utf-8")
    workloads = [
        (
            f'script = "{DDP}"; max_steps = {STEPS}; arguments = ["--width", "32"]; '
            "samples_per_step = 64; warmup_steps = 2"
        ),
        *(f'script = "{name}.py"; warmup_steps = 1' for name in SCRIPTS),
    ]
    spec = spec_text(
        workload="; [[workloads]]; ".join(workloads),
        tables="[telemetry]; enabled = false; [limits]; trial_s = 120; rendezvous_s = 40; "
        "collective_s = 20",
        repeats=1,
    )
    spec += trial("torchrun", "gloo", workloads=["ddp", "alone", "fails"])
    spec += trial("mpi", "mpi", workloads=["ddp"])
    (folder / "scripts.toml").write_text(spec, "utf-8")
    paceline = cli_in(cache, folder)
    finished = paceline("run", "scripts.toml", "--out", "run")
    compared = paceline.main("compare", "run", "--json")
    assert compared.returncode == 0, finished.stderr
    rows = {(r["workload"], r["launcher"]): r for r in json.loads(compared.stdout)["rows"]}
    return finished, rows, folder


def test_rows_have_the_statement_of_verify_as_their_mark(cache, forks, tmp_path):
    paceline = cli_in(cache, tmp_path, forks)
    words = ("--launcher", "local", "--local-strategy", "processes", "--ranks", "2")
    words += ("--repeats", "1", "--warmup-steps", "1", "--set", "measure_again=false")
    words += ("--set", "telemetry.enabled=false")
    ways = ("mean", "own-rows", "sum")
    vary = f"--vary=--way={','.join(ways)}"
    ran = paceline.main("run", "-q", *words, vary, "--out", "run", STATEMENTS)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(paceline.main("compare", "run", "--json").stdout)["rows"]
    rows = {row["configuration"].rpartition("way-")[2]: row for row in found if row["ranks"] == 2}
    marks = {way: (row["statement"], row["equivalent"]) for way, row in rows.items()}
    assert marks == {"mean": (1, True), "own-rows": (2, True), "sum": (5, False)}
    assert [rows[way]["equivalence_grade"] for way in ways] == ["whole", "start", None]
    assert rows["own-rows"]["other_rows"] == "its steps have 16 samples, those of the ranked ones 8"
    shown = " ".join(ran.stdout.split())
    rows_of_ranks = "2 \N{MULTIPLICATION SIGN} 8 rows"
    assert f"a right data-parallel step, in the first 4 steps ({rows_of_ranks})." in shown
    assert "first_steps: wrong; step 1: gradients are summed over 2 ranks" in shown


def outcome(run, trial):
    return json.loads((run[2] / "run/trials" / f"{trial}.r0/outcome.json").read_text("utf-8"))


@pytest.mark.parametrize("launcher", ["local", "torchrun", "mpi"])
def test_plain_ddp_is_equivalent_under_every_launcher(run, launcher):
    row = run[1]["ddp", launcher]
    assert (row["equivalent"], row["global_batch"]) == (True, 64)
    assert row["max_abs_weight_diff"] < 1e-6
    # the limit of steps ended the script
    assert row["samples"] == 64 * (STEPS - 2)


def test_steps_have_phases_and_communication(run):
    row = run[1]["ddp", "mpi"]
    phases = row["step_phases_s"]
    for name in ("data_wait", "forward", "backward", "comm_transfer", "optimizer"):
        assert phases[name] > 0
    rank = run[2] / "run/trials/ddp.mpi.mpi.processes.n1r2t1.fp32.r0/ranks/1"
    for step in pl.read_parquet(rank / "steps.parquet").to_dicts():
        parts = [step[f"{name}_s"] or 0.0 for name in PHASES]
        assert sum(parts) == pytest.approx(step["step_s"], rel=1e-6)
    assert (rank / "communication.parquet").exists()


def test_run_goes_on_and_ends_with_the_code_of_a_failed_rank(run):
    finished, rows, _ = run
    assert finished.returncode == 5
    assert {key for key, row in rows.items() if row["failed"]} == {
        ("no_step", "local"), ("alone", "torchrun"), ("fails", "torchrun"),
    }  # fmt: skip


def test_a_script_without_steps_is_refused(run):
    found = outcome(run, "no_step.local.none.sequential.n1r1t1.fp32")
    assert found["exit_code"] == 2
    assert "it ended without a step of an optimiser" in found["message"]


def test_ranks_without_a_process_group_are_refused(run):
    found = outcome(run, "alone.torchrun.gloo.processes.n1r2t1.fp32")
    assert found["exit_code"] == 2
    assert "torch.distributed.init_process_group, because the trial has 2 ranks" in found["message"]
    assert run[1]["alone", "local"]["equivalent"] is True


def test_an_exception_names_rank_file_and_line_and_keeps_its_stack(run):
    found = outcome(run, "fails.torchrun.gloo.processes.n1r2t1.fp32")
    assert found["exit_code"] == 5
    first_line = found["message"].partition("\n")[0]
    line = (
        SCRIPTS["fails"]
        .splitlines()
        .index("    assert step < 1 or dist.get_world_size() == 1, 'too far'")
    )
    assert f"fails.py, line {line + 1}: AssertionError: too far" in first_line
    assert f"rank {found['failed_rank']} of 2" in first_line
    log = run[2] / "run/trials/fails.torchrun.gloo.processes.n1r2t1.fp32.r0/ranks"
    assert "Traceback (most recent call last)" in (
        log / str(found["failed_rank"]) / "log.txt"
    ).read_text("utf-8")


def test_run_is_not_continued_with_another_script_in_silence(paceline, tmp_path):
    script, module = tmp_path / "mine.py", tmp_path / "own_steps.py"
    module.write_text("STEPS = 4\n")
    script.write_text(
        "from own_steps import STEPS\n" + TRAINING.format(steps="STEPS", inside="pass")
    )
    words = ("--local-strategy", "sequential", "--warmup-steps", "1", "--repeats", "1")
    words += ("--set", "measure_again=false")
    ran = paceline.main("run", *words, "--out", "run", "mine.py")
    assert ran.returncode == 0, ran.stderr
    (record,) = Path(tmp_path, "run").glob("trials/*/ranks/0/sources.json")
    found = json.loads(record.read_text())["files"]
    assert {"mine.py", "own_steps.py"} <= set(found)
    module.write_text("STEPS = 5\n")
    again = ("run", "--resume", "run", "--repeats", "2")
    refused = paceline.main(*again)
    assert refused.returncode == 7
    assert "found changes in own_steps.py" in refused.stderr
    continued = paceline.main(*again, "--changed-script")
    assert continued.returncode == 0, continued.stderr
    shown = " ".join(continued.stdout.split())
    assert "own_steps.py has changed during the run; measured with an older version: mine" in shown
    assert "(1 of 2 repeats)" in shown
    other = paceline.main("run", *words, "--out", "other", "mine.py")
    assert other.returncode == 0, other.stderr
    compared = paceline.main("compare", "run", "other")
    assert compared.stdout.startswith("own_steps.py differs.\n")
