"""A Spark application with one barrier stage; tests/environment.py archives its classes."""

from __future__ import annotations

from pyspark import SparkContext

with SparkContext() as context:
    stage = context.parallelize(range(10), 2).barrier()
    assert stage.mapPartitions(lambda numbers: [sum(numbers)]).collect() == [10, 35]
