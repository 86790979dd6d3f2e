"""`hybrid`: several replicas, each a pipeline."""
