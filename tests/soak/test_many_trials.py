"""Many trials in one run directory: memory, open files and disk use per trial do not grow."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest
from tests.functional.cli_runs import THREADS, Cli, small
from tests.soak.marked import MarkedCommand

from paceline.measure.records.files import read_json
from paceline.measure.records.layout import RunFiles
from paceline.plan.spec.loading import load_spec
from paceline.runner.trials.planning import plan
from paceline.runner.trials.preview import disk_uses, total_disk_use

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3 * 3600)]

LIMIT_S_PER_TRIAL = 60.0
GROWTH = 1.05  # allowed from the second quarter of the trials to the last one


@dataclass(frozen=True)
class Sample:
    """What one trial used; medians of the readings during the trial, once a second."""

    trial: int
    runner_rss_bytes: float
    runner_files: float
    sidecar_rss_bytes: float
    sidecar_files: float


def test_resources_stay_flat(
    paceline: Cli, tiny_dataset: Path, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    count, steps = (pytestconfig.getoption(f"--soak-{name}") for name in ("trials", "steps"))
    spec, out = tmp_path / "many.toml", tmp_path / "run"
    spec.write_text(
        # epochs: enough, because an epoch has several steps
        small(tiny_dataset, repeats=count // 2, image_size=64, max_steps=steps, epochs=steps)
        + THREADS
    )
    started_s = time.monotonic()
    argv = paceline.argv("run", spec, "--out", out)
    command = MarkedCommand(argv, paceline.environment, tmp_path)
    readings: dict[int, list[Sample]] = {}
    try:
        while True:
            code = command.wait(count * LIMIT_S_PER_TRIAL, until=after(1.0))
            if code is not None:
                break
            number = len(list(out.glob("trials/*/outcome.json")))
            sample = read(number, command.process.pid, out)
            if sample is not None:
                readings.setdefault(number, []).append(sample)
        assert code == 0, command.log.read_text()
        assert command.left() == []
    finally:
        command.end()
    samples = [median(found) for _, found in sorted(readings.items())]
    disk = {name: size_of(files.root) for name, files in RunFiles(out).trials()}
    predicted = predicted_bytes(spec, out)
    record = {
        "trials": count,
        "steps": steps,
        "seconds": round(time.monotonic() - started_s, 1),
        "bytes_per_trial": sorted(disk.values()),
        "bytes": size_of(out),
        "predicted_bytes": round(predicted),
        "samples": [asdict(sample) for sample in samples],
    }
    (tmp_path / "many_trials.json").write_text(json.dumps(record, indent=1))
    print(tmp_path / "many_trials.json")
    assert len(disk) == count
    for name in ("runner_rss_bytes", "runner_files", "sidecar_rss_bytes", "sidecar_files"):
        values = [getattr(sample, name) for sample in samples]
        assert_flat(name, values)
    assert 0.7 * predicted <= record["bytes"] <= 1.1 * predicted, record


def predicted_bytes(spec: Path, out: Path) -> float:
    """Return the disk use that the plan predicts for the time that the trials took."""
    use = total_disk_use(disk_uses(plan(load_spec(str(spec)))))
    outcomes = [read_json(files.outcome) for _, files in RunFiles(out).trials()]
    trained_s = sum(each["ended_unix_s"] - each["launched_unix_s"] for each in outcomes)
    return use.kept_bytes + use.trace_kept_bytes_per_s * trained_s


def after(seconds: float) -> Callable[[], bool]:
    """Return a condition that becomes true after some seconds."""
    end_s = time.monotonic() + seconds
    return lambda: time.monotonic() > end_s


def assert_flat(name: str, values: Sequence[float]) -> None:
    quarter = len(values) // 4
    before, after = (
        statistics.median(part) for part in (values[quarter : 2 * quarter], values[-quarter:])
    )
    assert after <= GROWTH * before, (
        f"{name}: {before:g} in the second quarter, {after:g} in the last"
    )


def read(number: int, runner: int, out: Path) -> Sample | None:
    """Read both processes while a trial trains; None between two trials."""
    states = out.glob("trials/*/hosts/*/sidecar.json")
    documents = [json.loads(state.read_text()) for state in states]
    running = [document["pid"] for document in documents if document["ended"] is None]
    if len(running) != 1:
        return None
    try:
        return Sample(number, *usage(runner), *usage(running[0]))
    except OSError:
        return None  # one has ended meanwhile


def usage(pid: int) -> tuple[int, int]:
    """Return the resident memory in bytes and the number of open files of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    [rss] = [int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:")]
    return rss, len(list(Path(f"/proc/{pid}/fd").iterdir()))


def median(found: Sequence[Sample]) -> Sample:
    values = zip(*(asdict(sample).values() for sample in found), strict=True)
    return Sample(*(statistics.median(value) for value in values))


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
