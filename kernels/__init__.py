"""Element-wise kernels on NumPy arrays, compiled by Numba; no MPI.

Importing this compiles nothing. A kernel is compiled, or loaded by `machine_code`, when `reducer` first returns it;
`python -m mpicoll.kernels.precompile` compiles all of them beforehand.
"""

from .decorators import compile_for, helper, kernel, uncached_kernel
from .reduce import DTYPES, OPS, carrier, reducer, user_reducer

__all__ = ["DTYPES", "OPS", "carrier", "compile_for", "helper", "kernel", "reducer", "uncached_kernel", "user_reducer"]
