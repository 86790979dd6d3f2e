"""Local SGD in rounds of ordinary Spark jobs that average weights (transport spark-rounds)."""
