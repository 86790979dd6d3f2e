"""Start one MPI job inside a Spark barrier stage."""
