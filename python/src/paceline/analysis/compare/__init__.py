"""The comparison of the configurations of one run."""
