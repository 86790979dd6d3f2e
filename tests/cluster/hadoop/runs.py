"""Runs with a trial on two nodes of YARN, and the settings of their site."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.cluster.hadoop.cluster import Hadoop, hadoop_on
from tests.cluster.lab.labs import checked_lab, hide
from tests.functional.cli_runs import NO_SIDECAR, small
from tests.support.environment import QUICK_JVM

from paceline.base.host.spark import find_spark
from paceline.runner.lab import INTERFACE, LabSettings

JOBS = Path(__file__).resolve().parents[3] / "spark-jobs"
_TRIAL = f"""
[[trials]]
launcher = "spark"
transport = "gloo"
local_strategy = "sequential"
nodes = 2
[network]
interface = "{INTERFACE}"
[spark]
master = "yarn"
"""
# Which Spark gives to its client only.
QUICK = QUICK_JVM["SPARK_SUBMIT_OPTS"].split()


@contextmanager
def hadoop_on_two_hosts(*, secured: bool = False) -> Iterator[Hadoop]:
    """Start Hadoop in a lab, of which the second host sees only runs with a local --out."""
    with checked_lab(LabSettings(hosts=2, slots=2)) as lab:
        runs = Path(lab.record.folder, "hadoop", "runs")
        runs.mkdir(parents=True)
        hide(runs, lab.hosts[1])
        with hadoop_on(lab, secured=secured) as started:
            yield started


def site_conf(folder: Path, options: Mapping[str, Sequence[str]]) -> Path:
    """Write a spark-defaults.conf as sites have it; return its folder.

    options: of the JVM of the driver and of executors.
    """
    conf = folder / "conf"
    conf.mkdir()
    lines = [
        f"spark.yarn.jars local:{find_spark().path}/jars/*",  # upload nothing
        *(
            f"spark.{name}.extraJavaOptions {' '.join([*own, *QUICK])}"
            for name, own in options.items()
        ),
        f"spark.yarn.am.extraJavaOptions {' '.join(QUICK)}",
        "spark.yarn.am.memory 256m",
    ]
    (conf / "spark-defaults.conf").write_text("\n".join(lines) + "\n", "utf-8")
    return conf


def spec_text(data: Path | str) -> str:
    """Return a spec with a baseline and a trial under Spark."""
    limits = {"trial_s": 400, "rendezvous_s": 200, "collective_s": 100}
    text = small(data, max_steps=6, image_size=32, dropout=True, **limits).replace(*NO_SIDECAR)
    return text.replace("[limits]", "[limits]\nslots_s = 200") + _TRIAL


def trial_file(run: Path, name: str) -> Path:
    """Return the path of a file of the trial under Spark."""
    [file] = run.glob(f"trials/*.spark.*/{name}")
    return file


def local_copy(hadoop: Hadoop, said: str, url: str) -> Path:
    """Return where a run with a remote place is on the first host, by what its command said."""
    [local] = re.findall(rf"the run is in (\S+) and in {re.escape(url)}$", said, re.MULTILINE)
    return hadoop.folder / local
