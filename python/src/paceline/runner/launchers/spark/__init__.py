"""Launch ranks as tasks of a Spark barrier stage."""
