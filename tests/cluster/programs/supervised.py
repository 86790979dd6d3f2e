"""A trial under mpirun on two hosts, looked after as `paceline run` does; says how it ended.

usage: supervised.py HOSTFILE OUTCOME_JSON OPTIONS…

A rank on each host; OPTIONS are those of the job scripts.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

from paceline.job.options import job_of, parser
from paceline.launch.diagnosis import diagnose
from paceline.launch.registry import launcher_for
from paceline.launch.supervise import supervise
from paceline.records.files import write_json

_LIMIT_S = 100.0


def main() -> None:
    hostfile, outcome = sys.argv[1], Path(sys.argv[2])
    options = parser("supervised.py").parse_args(sys.argv[3:])
    job = job_of(options, "mpi", nodes=2, ranks_per_node=1)
    settings = job.trial.mpi.model_copy(update={"hostfile": hostfile})
    trial = job.trial.model_copy(update={"mpi": settings})
    job.files.root.mkdir(parents=True)
    job.files.trial.write_text(trial.model_dump_json())
    launcher = launcher_for("mpi")
    ended = supervise(launcher.command(trial, job.files), job.files, limit_s=_LIMIT_S)
    write_json(outcome, dataclasses.asdict(diagnose(trial, job.files, ended, launcher)))


if __name__ == "__main__":
    main()
