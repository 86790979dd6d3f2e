"""Train in rounds of Spark jobs that average weights."""
