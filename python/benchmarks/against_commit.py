"""Speed of this checkout relative to another commit, in interleaved runs on one machine.

    python against_commit.py --other OTHER_CHECKOUT/.venv/bin/python --out against_commit.json

The other checkout needs an environment of its own with Paceline installed from it (`-e python`).
AlexNet 224x224, --batch samples a step on two cores, in eight configurations, and a 25 MB
all-reduce between two ranks. Each repeat runs every configuration with both versions, one directly
after the other, in a new random order. A ratio is the speed of this checkout divided by that of the
other: the median over repeats with a 95 % bootstrap interval.

Both versions ingest the same synthesised images with their own code. Each measurement uses the
`training_ways.py` and `allreduce.py` of its own checkout, in a fresh process.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_MEASURE = "--measure"  # the script's role in the fresh process
_WARMUP_STEPS = 4
_ALLREDUCE_BYTES = 25_000_000
_ALLREDUCE_CALLS = 20
_ALLREDUCE = "all-reduce 25 MB"
_LIMIT_S = 900.0
_TRAINING_TARGET, _ALLREDUCE_TARGET = 0.98, 0.95

# Name -> ([[trials]] keys, precision).
_PROCESSES = {"local_strategy": "processes"}
CONFIGURATIONS: dict[str, tuple[dict[str, str | int], str]] = {
    "torchrun sequential": ({"launcher": "torchrun", "local_strategy": "sequential"}, "fp32"),
    "local threads": ({"launcher": "local", "local_strategy": "threads"}, "fp32"),
    "local processes": ({"launcher": "local", **_PROCESSES}, "fp32"),
    "local pipeline": ({"launcher": "local", "local_strategy": "pipeline", "stages": 2}, "fp32"),
    "mpi/mpi": ({"launcher": "mpi", "transport": "mpi", **_PROCESSES}, "fp32"),
    "spark/gloo": ({"launcher": "spark", "transport": "gloo", **_PROCESSES}, "fp32"),
    "spark/mpi": ({"launcher": "spark", "transport": "mpi", **_PROCESSES}, "fp32"),
    "local processes bf16": ({"launcher": "local", **_PROCESSES}, "bf16"),
}

SPEC = """
schema = {schema}
name = "benchmark"
[training]
max_steps = {steps}
epochs = 1000
global_batch = {global_batch}
precision = "{precision}"
[[workloads]]
name = "simple-big"
data = "unused"
[[trials]]
launcher = "local"
local_strategy = "sequential"
[[trials]]
{trial}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """One checkout, by the Python interpreter of its environment."""

    python: Path
    benchmarks: Path  # folder of its benchmark scripts
    commit: str

    @classmethod
    def of(cls, python: Path) -> Version:
        """Find the checkout of an interpreter. Raises CalledProcessError without Paceline in it."""
        package = output_of([python, "-c", "import paceline; print(paceline.__path__[0])"])
        root = Path(package).parents[1]
        commit = output_of(["git", "-C", root, "rev-parse", "--short", "HEAD"])
        return cls(python=python, benchmarks=root / "benchmarks", commit=commit)


def output_of(command: list[Any], **environment: str) -> str:
    """Return the standard output of a command, stripped. Raises if it fails or takes too long."""
    done = subprocess.run(
        [str(word) for word in command],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        timeout=_LIMIT_S,
        check=True,
        text=True,
    )
    return done.stdout.strip()


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """Steps, those of the warm-up included, and samples of a step."""

    steps: int
    batch: int


def samples_per_s(
    version: Version, name: str, dataset: Path, training: Training, folder: Path
) -> float:
    """Train once, and return the throughput after warm-up."""
    command = [version.python, __file__, _MEASURE, version.benchmarks, name, dataset]
    command += [training.steps, training.batch, folder]
    ends_by_rank = json.loads(output_of(command).splitlines()[-1])
    ends = [max(step) for step in zip(*ends_by_rank, strict=True)]
    elapsed_s: float = ends[-1] - ends[_WARMUP_STEPS - 1]
    return (len(ends) - _WARMUP_STEPS) * training.batch / elapsed_s


def allreduces_per_s(version: Version) -> float:
    """Return the median rate of a 25 MB all-reduce of backend mpi4py between two ranks."""
    script = version.benchmarks / "allreduce.py"
    command = [version.python.with_name("mpirun"), "-n", 2, "--bind-to", "none"]
    command += ["--mca", "btl", "self,sm", version.python, "-m", "mpi4py", script]
    output = output_of(
        [*command, "--rank", _ALLREDUCE_BYTES, _ALLREDUCE_CALLS],
        OMP_NUM_THREADS="1",
        OMPI_ALLOW_RUN_AS_ROOT="1",
        OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1",
    )
    seconds: list[float] = json.loads(output.splitlines()[-1])["mpi"]
    return 1 / statistics.median(seconds)


def measure_training(name: str, dataset: Path, training: Training, folder: Path) -> None:
    """Train in this process's version, and print when each step ended, by rank.

    `training_ways` is that of the version's checkout.
    """
    import training_ways  # noqa: PLC0415  (another version's in a fresh process)
    from paceline.errors import PacelineError  # noqa: PLC0415

    keys, precision = CONFIGURATIONS[name]
    trial = "\n".join(f"{key} = {json.dumps(value)}" for key, value in keys.items())
    values = {"steps": training.steps, "global_batch": training.batch, "precision": precision}
    try:
        text = SPEC.format(schema=2, trial=trial, **values)
        (planned,) = training_ways.trials_of(text, dataset)
    except PacelineError:  # version 0.1
        text = SPEC.format(schema=1, trial=trial, **values)
        (planned,) = training_ways.trials_of(text, dataset)
    print(json.dumps(training_ways.paceline(planned, folder)), flush=True)


def measure_all(
    versions: dict[str, Version], names: list[str], repeats: int, training: Training, images: int
) -> dict[str, dict[str, list[float]]]:
    """Return the rates by configuration and version, one for each repeat."""
    rates: dict[str, dict[str, list[float]]] = {n: {v: [] for v in versions} for n in names}
    order = random.Random(1)  # noqa: S311  (an order, not a secret)
    with tempfile.TemporaryDirectory(prefix="paceline-benchmark-") as temporary:
        folder = Path(temporary)
        datasets = make_datasets(versions, folder, "simple-big", images)
        for repeat in range(repeats):
            order.shuffle(names)
            for name in names:
                for label in order.sample(list(versions), len(versions)):
                    version, own = versions[label], folder / f"{repeat} {name} {label}"
                    if name == _ALLREDUCE:
                        rate = allreduces_per_s(version)
                    else:
                        rate = samples_per_s(version, name, datasets[label], training, own)
                    rates[name][label].append(rate)
                    print(f"{repeat} {name}, {label}: {rate:.2f} per second", file=sys.stderr)
    return rates


def make_datasets(
    versions: dict[str, Version], folder: Path, preset: str, images: int
) -> dict[str, Path]:
    """Synthesise images with this version, and ingest them with each version."""
    synth = [versions["this"].python.with_name("paceline"), "data", "synth", folder / "images"]
    output_of([*synth, "--preset", preset, "--images", images])
    for label, version in versions.items():
        paceline = version.python.with_name("paceline")
        output_of([paceline, "data", "ingest", folder / "images", folder / f"dataset {label}"])
    return {label: folder / f"dataset {label}" for label in versions}


def conclude(rates: dict[str, dict[str, list[float]]]) -> list[dict[str, Any]]:
    """Print the ratio of each configuration, and return what the results keep."""
    from common import paired_ratio, shown  # noqa: PLC0415  (not in the fresh processes)

    found = []
    for name, by_version in rates.items():
        target = _ALLREDUCE_TARGET if name == _ALLREDUCE else _TRAINING_TARGET
        ratio = paired_ratio(by_version["this"], by_version["other"])
        shown(f"{name}, this / other (target: at least {target})", ratio, "x")
        reached = ratio["median"] >= target
        found.append({"configuration": name, "target": target, "reached": reached, **ratio})
    return found


def main() -> None:
    if sys.argv[1:2] == [_MEASURE]:
        benchmarks, name, dataset, steps, batch, folder = sys.argv[2:]
        sys.path[0] = benchmarks  # in place of this script's folder
        training = Training(steps=int(steps), batch=int(batch))
        measure_training(name, Path(dataset), training, Path(folder))
        return
    from common import write_results  # noqa: PLC0415  (not in the fresh processes)

    every = [*CONFIGURATIONS, _ALLREDUCE]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--other", type=Path, required=True, help="interpreter of the other commit")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=16, help="of a training, warm-up included")
    parser.add_argument("--batch", type=int, default=64, help="samples of a step")
    parser.add_argument("--images", type=int, default=512, help="in the data set")
    parser.add_argument("--only", nargs="+", choices=every, default=every, metavar="CONFIGURATION")
    arguments = parser.parse_args()
    if arguments.steps <= _WARMUP_STEPS + 1:
        parser.error(f"--steps: expected more than {_WARMUP_STEPS + 1}, got {arguments.steps}")

    versions = {
        "this": Version.of(Path(sys.executable)),
        "other": Version.of(arguments.other.absolute()),
    }
    load_before = os.getloadavg()[0]
    training = Training(steps=arguments.steps, batch=arguments.batch)
    rates = measure_all(
        versions, list(arguments.only), arguments.repeats, training, arguments.images
    )
    write_results(
        arguments.out,
        "against_commit",
        {
            "commits": {label: version.commit for label, version in versions.items()},
            "load_average_before": load_before,  # above about 0.5, other programs disturb
            "ratios": conclude(rates),
            "per_second": rates,
        },
    )


if __name__ == "__main__":
    main()
