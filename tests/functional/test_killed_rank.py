"""`kill -9` of one rank: everything ends, the message names the rank, `--resume` completes."""

import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
from tests.functional.cli_runs import SMALL, trial

pytestmark = [pytest.mark.functional, pytest.mark.timeout(400)]

# Long enough to be killed within; nothing waits for it to end.
ENDLESS = SMALL.replace("max_steps = 20", "max_steps = 100000").replace(
    "epochs = 8", "epochs = 100000"
)
GONE_WITHIN_S = {"mpi": 10.0, "spark": 30.0}  # what the project promises
STARTED_WITHIN_S = 90.0


def wait_for(condition, limit_s, what):
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        found = condition()
        if found:
            return found
        time.sleep(0.1)
    raise AssertionError(f"{what}: not within {limit_s:.0f} s")


def running_rank(run_dir: Path, launcher: str, rank: int) -> int | None:
    """Process id of a rank that has begun to train."""
    for folder in run_dir.glob(f"trials/tiny.{launcher}.*/ranks/{rank}"):
        steps, status = folder / "steps.jsonl", folder / "status.json"
        if steps.exists() and steps.stat().st_size > 0 and status.exists():
            return int(json.loads(status.read_text())["pid"])
    return None


def alive(run_dir: Path) -> list[str]:
    """Command lines of living processes that belong to the run."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
            stat = (path.parent / "stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        ended = stat.rpartition(")")[2].split()[0] == "Z"
        if not ended and any(str(run_dir).encode() in word for word in words):
            found.append(b" ".join(words).decode(errors="replace"))
    return found


@pytest.mark.parametrize("launcher", ["mpi", "spark"])
def test_killed_rank_is_named_and_resume_completes(paceline, tmp_path, launcher, small_run):
    spec, out, log = tmp_path / "endless.toml", tmp_path / "run", tmp_path / "log.txt"
    entry = trial(launcher, "mpi" if launcher == "mpi" else "gloo")
    spec.write_text(ENDLESS + entry)
    short = tmp_path / "short.toml"
    short.write_text(SMALL + entry)
    # The baseline would never end: let it be finished already, by an equal run that is short.
    shutil.copytree(small_run, out)
    finished = {p: p.read_bytes() for p in out.glob("trials/*sequential*/outcome.json")}
    assert finished
    manifest = out / "manifest.json"
    document = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**document, "spec_toml": spec.read_text()}))

    process = paceline.start("run", spec, "--out", out, "--resume", log=log)
    try:
        pid = wait_for(lambda: running_rank(out, launcher, 1), STARTED_WITHIN_S, "rank 1 training")
        os.kill(pid, signal.SIGKILL)
        code = process.wait(timeout=GONE_WITHIN_S[launcher])
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(timeout=30)
    message = log.read_text()
    assert code == 5, message
    assert "rank 1" in message
    assert "Traceback" not in message
    assert alive(out) == []
    assert {p: p.read_bytes() for p in finished} == finished

    manifest.write_text(json.dumps({**document, "spec_toml": short.read_text()}))
    result = paceline("run", short, "--out", out, "--resume")
    assert result.returncode == 0, result.stderr
    assert {p: p.read_bytes() for p in finished} == finished
    rows = json.loads(paceline.main("compare", out, "--json").stdout)["rows"]
    assert [row["equivalent"] for row in rows] == [True, True]
    (killed,) = (out / "attempts").iterdir()
    assert killed.name.startswith(f"tiny.{launcher}.")


def test_interrupt_ends_everything_and_resume_completes(paceline, tmp_path):
    spec, out, log = tmp_path / "endless.toml", tmp_path / "run", tmp_path / "log.txt"
    spec.write_text(ENDLESS)
    process = paceline.start("run", spec, "--out", out, log=log)
    try:
        wait_for(lambda: running_rank(out, "local", 0), STARTED_WITHIN_S, "rank 0 training")
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 130, log.read_text()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(timeout=30)
    assert alive(out) == []
    assert list(out.glob("trials/*/outcome.json")) == []


def test_killed_paceline_leaves_no_process(paceline, tmp_path):
    spec, out, log = tmp_path / "endless.toml", tmp_path / "run", tmp_path / "log.txt"
    spec.write_text(ENDLESS)
    process = paceline.start("run", spec, "--out", out, log=log)
    try:
        wait_for(lambda: running_rank(out, "local", 0), STARTED_WITHIN_S, "rank 0 training")
    finally:
        process.kill()
        process.wait(timeout=30)
    wait_for(lambda: alive(out) == [], 15, "every process of the run gone")


def test_killed_sidecar_does_not_touch_the_training(paceline, tmp_path):
    spec, out, log = tmp_path / "small.toml", tmp_path / "run", tmp_path / "log.txt"
    spec.write_text(
        SMALL.replace("max_steps = 20", "max_steps = 60").replace("epochs = 8", "epochs = 30")
    )

    def sidecar() -> int | None:
        for path in out.glob("trials/*/hosts/*/sidecar.json"):
            return int(json.loads(path.read_text())["pid"])
        return None

    process = paceline.start("run", spec, "--out", out, log=log)
    try:
        os.kill(wait_for(sidecar, STARTED_WITHIN_S, "the sidecar"), signal.SIGKILL)
        assert process.wait(timeout=120) == 0, log.read_text()
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(timeout=30)
    (row,) = json.loads(paceline.main("compare", out, "--json").stdout)["rows"]
    assert row["equivalent"] is True
    assert row["samples_per_s"]["median"] > 0
