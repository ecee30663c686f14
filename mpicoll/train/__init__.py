"""Data-parallel training on top of the collectives: ``mpirun -n 8 python -m mpicoll.train``.

Importing this package imports nothing else: the number of threads must be chosen before NumPy starts.
"""
