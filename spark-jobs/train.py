"""Train one trial under Spark: spark-submit spark-jobs/train.py OPTIONS."""

from __future__ import annotations

import sys
from pathlib import Path

try:
    import paceline  # noqa: F401
except ImportError:  # unpacked from the archive: the package lies beside this script
    sys.path.insert(0, str(Path(__file__).resolve().with_name("paceline.zip")))

from paceline.runner.job.rank_status import run_guarded
from paceline.runner.launchers.spark.stage import main

if __name__ == "__main__":
    sys.exit(run_guarded(lambda: main(Path(__file__).resolve().with_name("paceline.zip"))))
