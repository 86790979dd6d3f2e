"""Ranks that train in rounds of tasks, with transport `spark-rounds`."""
