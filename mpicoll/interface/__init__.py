"""Collectives of the mpi4py face: blocking, nonblocking and persistent, with mpi4py's names and arguments."""
