"""Transport `mpi`: its descriptor, and the class that opens it in ranks of an MPI job."""
