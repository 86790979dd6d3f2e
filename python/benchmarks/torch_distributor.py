"""The same bare training under pyspark's own TorchDistributor: what Paceline's start is held to.

spark-submit --master local[2] torch_distributor.py OUT
"""

from __future__ import annotations

import sys
from pathlib import Path

from pyspark.ml.torch.distributor import TorchDistributor
from pyspark.sql import SparkSession


def main() -> None:
    script = Path(__file__).with_name("bare_ddp.py")
    spark = SparkSession.builder.getOrCreate()
    TorchDistributor(num_processes=2, local_mode=False, use_gpu=False).run(
        str(script), "--backend", "gloo", "--steps", "2", "--out", sys.argv[1]
    )
    spark.stop()


if __name__ == "__main__":
    main()
