"""A trial on two hosts, looked after as `paceline run` does; says how it ended.

usage: supervised.py mpi HOSTFILE OUTCOME_JSON OPTIONS…
       supervised.py spark MASTER OUTCOME_JSON OPTIONS…

OPTIONS are those of the job scripts.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path
from typing import Any

from paceline.measure.records.files import write_json
from paceline.plan.trials.trial import Trial
from paceline.runner.job.job import parse_job
from paceline.runner.launchers.base import launcher_for
from paceline.runner.launchers.diagnosis import diagnose
from paceline.runner.launchers.supervise import EXIT_S, WaitLimits, supervise

_LIMIT_S = 300.0


def placed(trial: Trial, launcher: str, where: str) -> Trial:
    """The trial on the hosts of a host list, or of a Spark cluster."""
    if launcher == "mpi":
        options: dict[str, Any] = {"hostfile": where}
    else:
        own = os.environ["SPARK_SUBMIT_OPTS"].split()
        conf = {
            # Executors of a busy machine take longer to start than the launcher waits for them.
            "spark.scheduler.maxRegisteredResourcesWaitingTime": "60s",
            "spark.executor.extraJavaOptions": " ".join(w for w in own if w[:2] != "-D"),
        }
        options = {"master": where, "conf": conf}
    return trial.model_copy(
        update={"launcher_options": trial.launcher_options.model_copy(update=options)}
    )


def main() -> None:
    name, where, outcome = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    job = parse_job(name, "supervised.py", sys.argv[4:])
    trial = placed(job.trial, name, where)
    job.files.root.mkdir(parents=True)
    job.files.trial.write_text(trial.model_dump_json())
    launcher = launcher_for(name)
    limits = WaitLimits(trial_s=_LIMIT_S, exit_s=EXIT_S)
    ended = supervise(launcher.command(trial, job.files), job.files, limits)
    write_json(outcome, dataclasses.asdict(diagnose(trial, job.files, ended, launcher)))


if __name__ == "__main__":
    main()
