"""Launch ranks with mpirun."""
