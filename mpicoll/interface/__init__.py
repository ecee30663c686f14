"""Collectives with mpi4py's names and arguments: blocking, nonblocking and persistent."""
