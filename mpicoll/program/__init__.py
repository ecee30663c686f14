"""``python -m mpicoll run``: any mpi4py program, unmodified, on mpicoll's communicators, with a profile if wanted."""
