"""Ingest images on a Spark cluster: spark-submit spark-jobs/ingest.py IMAGES_DIR OUT_DATASET.

IMAGES_DIR is a folder that all executors see. The `paceline` package is taken from `paceline.zip`
beside this script if it is there (and shipped to the executors), else from what is installed.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from pyspark import SparkContext
from pyspark.sql import SparkSession

ARCHIVE = Path(__file__).resolve().parent / "paceline.zip"


def main() -> int:
    """Ingest with the session that exists or that spark-submit configured; return the exit code."""
    parser = argparse.ArgumentParser(
        description="convert images in class folders into a Petastorm data set"
    )
    parser.add_argument("images", type=Path, help="folder with one sub-folder per class")
    parser.add_argument("out", help="new folder or URL of the data set")
    parser.add_argument("--on-bad-image", choices=("fail", "skip"), default="fail")
    parser.add_argument("--seed", type=int, default=0, help="seed of the order of the samples")
    parser.add_argument(
        "--row-group-rows", type=int, default=None, help="approximate images per row group"
    )
    options = parser.parse_args()

    if ARCHIVE.is_file():
        sys.path.insert(0, str(ARCHIVE))
    from paceline.base.errors import PacelineError  # noqa: PLC0415
    from paceline.train.data.ingest import ingest  # noqa: PLC0415  (on the path only now)

    is_own = SparkContext._active_spark_context is None  # noqa: SLF001  (else that of a notebook)
    spark = SparkSession.builder.appName("paceline ingest").getOrCreate()
    try:
        if ARCHIVE.is_file():
            spark.sparkContext.addPyFile(str(ARCHIVE))
        manifest = ingest(
            options.images,
            options.out,
            on_bad_image=options.on_bad_image,
            seed=options.seed,
            spark=spark,
            row_group_rows=options.row_group_rows,
        )
    except PacelineError as error:
        print(f"paceline: {error}", file=sys.stderr)
        return int(error.exit_code)
    finally:
        if is_own:
            spark.stop()
    print(f'{manifest.summary}; use it with data = "{options.out}"')
    return 0


if __name__ == "__main__":
    sys.exit(main())
