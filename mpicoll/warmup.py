"""``python -m mpicoll warmup``: compile everything beforehand, so that no rank compiles while others wait.

Needs no launcher. What is compiled stays in Numba's cache, beside the source or in NUMBA_CACHE_DIR.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

import numpy as np

from mpicoll.compression import ErrorFeedback, compressor, names
from mpicoll.kernels import warmup as kernels

_COUNT = 5000
"""Long enough for blocks that are whole and one that is not."""
_VALUES = {"error": "error:1e-3"}
"""Compressors that need a setting."""


def compressors(specs: Sequence[str]) -> None:
    """Send a vector through these compressors, to this process alone, with and without error feedback."""
    from mpi4py import MPI

    from mpicoll import Intracomm

    comm = Intracomm(MPI.COMM_SELF)
    for spec in specs:
        for way in (spec, ErrorFeedback(spec)):
            comm.Allreduce(MPI.IN_PLACE, np.ones(_COUNT, np.float32), compression=way)


def main(argv: Sequence[str] | None = None) -> int:
    """Compile, and say how long it took; exit status 2 for a compressor that there is not."""
    parser = argparse.ArgumentParser(
        prog="python -m mpicoll warmup", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    every = [_VALUES.get(name, name) for name in names()]
    help_ = "compressors whose kernels are compiled (default: all); none if none is given"
    parser.add_argument("--compression", nargs="*", default=every, metavar="SPEC", help=help_)
    arguments = parser.parse_args(argv)
    try:
        for spec in arguments.compression:
            compressor(spec)
    except ValueError as error:
        parser.error(f"--{error}")
    kernels.main([])
    begin = time.perf_counter()
    compressors(arguments.compression)
    ready = len(arguments.compression)
    sys.stdout.write(f"{ready} compressor{'s' * (ready != 1)} ready in {time.perf_counter() - begin:.1f} s\n")
    return 0
