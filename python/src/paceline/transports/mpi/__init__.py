"""MPI as a torch.distributed backend: PyPI's torch is built without it.

Nothing is imported here: importing mpi4py's MPI initialises it, which only MPI's own ranks should.
"""
