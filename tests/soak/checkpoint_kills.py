"""Train with a checkpoint every few steps, and kill the training at random times again and again.

    python tests/soak/checkpoint_kills.py FOLDER KILLS SEED

Each training is a fork of this process, which has imported torch and computes nothing itself. After
each kill the newest checkpoint must be loadable, and the next fork continues from it. A training
that reaches its end must have the weights of one without kills; then another one begins. FOLDER
gets kills.json with one row for each kill.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1] / "contract/programs"))
from ranks import make_context, make_trial
from tests.support.fabricated_samples import FakeFeed, opening

from paceline.measure.records.documents import CheckpointFolder
from paceline.measure.records.files import read_jsonl, write_json
from paceline.measure.records.layout import TrialFiles
from paceline.plan.spec.values import CheckpointSettings
from paceline.runner.job.rank import begin_attempt
from paceline.train.rank import train as worker
from paceline.train.training.state_files import StateFiles

EVERY, EPOCHS = 3, 40  # 120 steps
LONGEST_S = 1.2  # from a start to its kill


def train(folder: Path) -> None:
    """Train to the end, from the newest checkpoint of the folder."""
    worker.open_samples = opening((11, 10), lambda order, **_: FakeFeed(order))
    trial = make_trial("none", 1, local_strategy="sequential", epochs=EPOCHS)
    trial = trial.model_copy(update={"checkpoint": CheckpointSettings(every_steps=EVERY)})
    files = TrialFiles(folder)
    begin_attempt(files.rank(0))
    write_json(files.rank(0).status, {"state": "running"})
    worker.train(trial, make_context(folder), files)


def start(folder: Path) -> int:
    """Start a training in a fork; return its process id."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        with (folder.parent / "log.txt").open("a") as log:
            os.dup2(log.fileno(), 2)
            train(folder)
            code = 0
    except BaseException:  # noqa: BLE001  (a fork must not return into the parent's code)
        traceback.print_exc()
    finally:
        os._exit(code)


def newest(folder: Path) -> int:
    """Return the steps of the newest checkpoint; it must be undamaged, and every part readable."""
    complete = CheckpointFolder(TrialFiles(folder).checkpoints).complete()
    if not complete:
        return 0
    complete[0].check()
    saved = StateFiles(complete[0])
    for name in saved.names("weights/"):
        assert saved.tensor(f"weights/{name}") is not None
    return saved.steps


def steps_done(folder: Path) -> int:
    path = TrialFiles(folder).rank(0).steps
    return max((row["step"] + 1 for row in read_jsonl(path)), default=0) if path.exists() else 0


def weights_of(folder: Path) -> str:
    return str(json.loads(TrialFiles(folder).result.read_text())["weights_sha256"])


def killed(child: int, after_s: float) -> bool:
    """Kill the child after some seconds; return False if it has ended before."""
    deadline = time.monotonic() + after_s
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            assert status == 0, f"training ended with status {status}"
            return False
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


def check_end(folder: Path, whole: Path) -> None:
    assert weights_of(folder) == weights_of(whole), f"{folder}: other weights than without kills"
    assert not list(folder.rglob("*.part")), "temporary files are left"


def main() -> None:
    root, kills, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    draw = random.Random(seed)
    whole = root / "whole"
    whole.mkdir(parents=True)
    assert os.waitpid(start(whole), 0)[1] == 0, (root / "log.txt").read_text()
    rows: list[dict[str, Any]] = []
    trainings, before, folder = 0, 0, root / "0"
    folder.mkdir()
    while len(rows) < kills:
        if killed(start(folder), draw.uniform(0.0, LONGEST_S)):
            saved, done = newest(folder), steps_done(folder)
            rows.append({"steps": done, "saved": saved, "lost": done - saved})
            assert saved >= before, "a checkpoint was lost"
            before = saved
            continue
        check_end(folder, whole)
        trainings, before = trainings + 1, 0
        folder = root / str(trainings)
        folder.mkdir()
    assert os.waitpid(start(folder), 0)[1] == 0, (root / "log.txt").read_text()
    check_end(folder, whole)
    trainings += 1
    lost = [row["lost"] for row in rows]
    write_json(
        root / "kills.json",
        {"kills": rows, "trainings": trainings, "most_lost": max(lost), "every_steps": EVERY},
    )
    print(f"{len(rows)} kills, {trainings} trainings ended, at most {max(lost)} steps lost")


if __name__ == "__main__":
    main()
