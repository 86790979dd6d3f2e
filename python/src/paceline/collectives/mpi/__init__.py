"""MPI as a torch.distributed backend, because torch from PyPI is built without MPI.

This package imports nothing: importing mpi4py.MPI initialises MPI, and only ranks of an MPI job may
do that.
"""
