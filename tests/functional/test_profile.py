"""A rank slowed on purpose is named, by a real run's records, and the sums of its profile agree.

Nothing here depends on how fast the machine is, only on a busy loop being the longest thing in a
step; that the loss is right to a tenth is shown by benchmarks/straggler.py.
"""

import json
import sys
from pathlib import Path

import pytest
from tests.support.commands import run_command
from tests.support.environment import AS_ROOT, kept_environment
from tests.support.forking import LOADED_WITH
from tests.support.job_specs import NO_SIDECAR, job_words

pytestmark = [pytest.mark.functional, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
SLOWED = ROOT / "python" / "benchmarks" / "slowed_rank.py"
JOB = ROOT / "mpi-jobs" / "train.py"
STEPS, WARMUP = 8, 2
SLOW_S = 0.3  # some ten times the rest of the step, so that no other process hides it
KEYS = {
    "seed": 1, "max_steps": STEPS, "warmup_steps": WARMUP, "epochs": 9, "global_batch": 16,
    "image_size": 64, "dropout": False, "telemetry": NO_SIDECAR, "oversubscribe": True,
    "ranks_per_node": 2,
}  # fmt: skip


@pytest.fixture(scope="module", params=["mpi", "gloo", "shared"])
def slowed_run(request, tiny_dataset, tmp_path_factory, forks):
    """(transport, run directory) of two ranks, of which rank 1 spins in every forward pass."""
    out = tmp_path_factory.mktemp("profile") / request.param
    keys = {"transport": request.param, "data": tiny_dataset, **KEYS}
    if request.param != "shared":
        keys["bucket_mb"] = 0.05
    argv = [
        Path(sys.executable).with_name("mpirun"), "-n", "2", "--bind-to", "none",
        "--host", "localhost:2", *forks.python, SLOWED, "1", SLOW_S, "1", JOB,
        *job_words(out.parent, "mpi", **keys), "--out", out,
    ]  # fmt: skip
    result = run_command(argv, 200, env=kept_environment(**LOADED_WITH, **AS_ROOT))
    assert result.returncode == 0, result.stderr
    return request.param, out


def test_slowed_rank_is_named_and_the_sums_agree(slowed_run, paceline):
    transport, out = slowed_run
    result = paceline.main("profile", out, "--json")
    assert result.returncode == 0, result.stderr
    (trial,) = json.loads(result.stdout)["trials"]
    assert trial["transport"] == transport
    assert trial["operations_recorded"]
    assert trial["clock_error_s"] == 0  # one host
    (found,) = trial["stragglers"]
    assert found["straggler"] == 1
    assert found["phase"] == "forward"
    assert found["steps"] == STEPS - WARMUP
    for rank in trial["ranks"]:
        phases = sum(v for v in rank["phases_s"].values() if v is not None)
        assert phases == pytest.approx(rank["step_s"], rel=1e-6)
        assert rank["compute_s"] + rank["comm_s"] == pytest.approx(rank["step_s"], rel=1e-6)
        assert rank["exposed_s"] + rank["between_s"] == pytest.approx(rank["comm_s"], rel=1e-6)
        assert rank["wall_s"] == pytest.approx(rank["step_s"], rel=0.02)
    steps = {each["operation"]: each["count"] for each in trial["ranks"][0]["bins"]}
    assert set(steps) == {"shared_reduce" if transport == "shared" else "allreduce"}
    assert sum(steps.values()) % (STEPS - WARMUP) == 0


def test_trace_has_both_ranks(slowed_run, paceline, tmp_path):
    transport, out = slowed_run
    result = paceline.main("export", out, "--to", "perfetto", "--out", tmp_path)
    assert result.returncode == 0, result.stderr
    [trace] = [path for path in tmp_path.glob("*.json") if ".n1r2t" in path.name]
    events = json.loads(trace.read_text())["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    assert {event["pid"] for event in slices} == {0, 1}
    assert sum(event["name"].startswith("step ") for event in slices) == 2 * STEPS
    name = "shared_reduce" if transport == "shared" else "allreduce"
    waiting = [e for e in slices if e["name"] == "waiting" and e["pid"] == 0]
    assert waiting
    assert {event["args"]["for rank"] for event in waiting} >= {1}
    assert any(event["name"] == name for event in slices)
