"""All-reduce over Spark's barrier allGather."""
