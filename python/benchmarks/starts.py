"""Start and end of a trial in this checkout relative to another commit, interleaved.

    python starts.py --other OTHER_CHECKOUT/.venv/bin/python --out starts.json

The other checkout needs an environment of its own with Paceline installed from it (`-e python`).
Each trial has two steps. Measured are the time from the launch command to the end of the slowest
rank's first step, the time to the exit of the launcher, and the CPU time of its processes (under
Spark without the ranks, whose parents do not wait for them). A ratio is the value of this checkout
divided by that of the other: the median over repeats with a 95 % bootstrap interval. Both versions
ingest the same synthesised images with their own code.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import sys
import tempfile
from pathlib import Path
from typing import Any

from against_commit import Version, make_datasets, output_of

_MEASURE = "--measure"  # the script's role in the fresh process
_STEPS = 2
_RANKS = 2
_SAMPLES = 96
_TO_STEP, _TO_EXIT, _CPU = "launch_to_first_step_s", "launch_to_exit_s", "cpu_s"
_TWO_RANKS = f'local_strategy = "processes"\nranks_per_node = {_RANKS}\n'

# Name -> ([[trials]] keys, measure with a target, target).
CASES = {
    "local": ('launcher = "local"\nlocal_strategy = "intraop"\n', _TO_EXIT, 0.75),
    "local, two ranks": (f'launcher = "local"\n{_TWO_RANKS}', _TO_EXIT, 0.75),
    "mpirun": (f'launcher = "mpi"\ntransport = "mpi"\n{_TWO_RANKS}', _TO_EXIT, 0.75),
    "spark, gloo": (f'launcher = "spark"\ntransport = "gloo"\n{_TWO_RANKS}', _TO_STEP, 0.7),
    "spark, mpi": (f'launcher = "spark"\ntransport = "mpi"\n{_TWO_RANKS}', _TO_STEP, 0.7),
}

SPEC = """
schema = {schema}
name = "starts"
[training]
max_steps = {steps}
global_batch = 16
[[workloads]]
name = "{workload}"
data = "unused"
[[trials]]
launcher = "local"
local_strategy = "sequential"
[[trials]]
{trial}
"""


def measured(
    version: Version, name: str, workload: str, dataset: Path, folder: Path
) -> dict[str, float]:
    """Run a trial in a fresh process of that version; return its values by measure."""
    command = [version.python, __file__, _MEASURE, version.benchmarks]
    command += [name, workload, dataset, folder]
    values: dict[str, float] = json.loads(output_of(command).splitlines()[-1])
    return values


def measure(name: str, workload: str, dataset: Path, folder: Path) -> dict[str, float]:
    """Run a trial with this process's version. Raises RuntimeError if it fails."""
    import training_ways  # noqa: PLC0415  (another version's in a fresh process)
    from paceline.errors import PacelineError  # noqa: PLC0415
    from paceline.plan.planning import plan_trials  # noqa: PLC0415
    from paceline.records.files import read_json  # noqa: PLC0415
    from paceline.records.layout import TrialFiles  # noqa: PLC0415
    from paceline.spec.loading import parse_spec  # noqa: PLC0415

    def parsed(schema: int) -> Any:
        values = {"workload": workload, "steps": _STEPS, "trial": CASES[name][0]}
        return parse_spec(SPEC.format(schema=schema, **values), "benchmark")

    try:
        experiment = parsed(2)
    except PacelineError:  # version 0.1
        experiment = parsed(1)
    planned = plan_trials(experiment, {workload: str(dataset)}, _RANKS)
    trial = next(t for t in planned if not t.is_baseline)
    ends = training_ways.paceline(trial.model_copy(update={"save_tensors": False}), folder)
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    outcome = read_json(TrialFiles(folder / trial.id).outcome)
    return {
        _TO_STEP: max(steps[0] for steps in ends) - outcome["launched_unix_s"],
        _TO_EXIT: outcome["ended_unix_s"] - outcome["launched_unix_s"],
        _CPU: children.ru_utime + children.ru_stime,
    }


def measure_all(
    versions: dict[str, Version], names: list[str], workload: str, repeats: int
) -> dict[str, dict[str, dict[str, list[float]]]]:
    """Return the values by case, measure and version, one for each repeat."""
    values: dict[str, dict[str, dict[str, list[float]]]] = {
        name: {m: {v: [] for v in versions} for m in (_TO_STEP, _TO_EXIT, _CPU)} for name in names
    }
    order = random.Random(1)  # noqa: S311  (an order, not a secret)
    with tempfile.TemporaryDirectory(prefix="paceline-benchmark-") as temporary:
        folder = Path(temporary)
        datasets = make_datasets(versions, folder, workload, _SAMPLES)
        for repeat in range(repeats):
            order.shuffle(names)
            for name in names:
                for label in order.sample(list(versions), len(versions)):
                    own = folder / f"{repeat} {name} {label}"
                    found = measured(versions[label], name, workload, datasets[label], own)
                    for measure_name, value in found.items():
                        values[name][measure_name][label].append(value)
                    shown = ", ".join(f"{key} {value:.2f}" for key, value in found.items())
                    print(f"{repeat} {name}, {label}: {shown}", file=sys.stderr)
    return values


def conclude(values: dict[str, dict[str, dict[str, list[float]]]]) -> list[dict[str, Any]]:
    """Print the ratios, and return what the results keep."""
    from common import paired_ratio, shown  # noqa: PLC0415  (not in the fresh processes)

    found = []
    for name, by_measure in values.items():
        _, with_target, target = CASES[name]
        for measure_name, by_version in by_measure.items():
            ratio = paired_ratio(by_version["this"], by_version["other"])
            wanted = target if measure_name == with_target else None
            said = "" if wanted is None else f" (target: at most {wanted})"
            shown(f"{name}, {measure_name}{said}", ratio, "x")
            found.append({"case": name, "measure": measure_name, "target": wanted, **ratio})
    return found


def main() -> None:
    if sys.argv[1:2] == [_MEASURE]:
        benchmarks, name, workload, dataset, folder = sys.argv[2:]
        sys.path[0] = benchmarks  # in place of this script's folder
        print(json.dumps(measure(name, workload, Path(dataset), Path(folder))), flush=True)
        return
    from common import write_results  # noqa: PLC0415  (not in the fresh processes)

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--other", type=Path, required=True, help="interpreter of the other commit")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--workload", choices=("tiny", "simple-big"), default="tiny")
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), metavar="CASE")
    arguments = parser.parse_args()
    versions = {
        "this": Version.of(Path(sys.executable)),
        "other": Version.of(arguments.other.absolute()),
    }
    load_before = os.getloadavg()[0]
    values = measure_all(versions, list(arguments.only), arguments.workload, arguments.repeats)
    write_results(
        arguments.out,
        "starts",
        {
            "commits": {label: version.commit for label, version in versions.items()},
            "load_average_before": load_before,  # above about 0.5, other programs disturb
            "ratios": conclude(values),
            "values": values,
        },
    )


if __name__ == "__main__":
    main()
