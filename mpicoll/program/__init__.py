"""``python -m mpicoll run``: unmodified mpi4py programs on mpicoll's communicators, with an optional profile."""
