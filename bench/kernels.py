"""The reducers and compressors against NumPy and against a copy: ``python -m bench.kernels``.

One process, one core. ``out`` says where the result goes: to a new array, or over one of the operands. ``ours`` is
NumPy's time over ours, ``copy`` the time of `numpy.copyto` over NumPy's: a copy touches two streams of memory, a
reduction three, so that long vectors are as fast as memory lets them be from about two thirds of the copy's speed on.
``of_copy`` (``--long``) is the share of the copy's bandwidth; for compressors see :mod:`bench.compression_kernels`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
from mpi4py import MPI

from bench import compression_kernels, harness
from bench.benchmark_options import make_parser
from bench.operations import NUMPY as UFUNCS
from bench.result_files import COPY, NUMPY, Case
from mpicoll.kernels import DTYPES, OPS, carrier, reducer

OURS = "ours"
_SIZES = [16 << 10, 256 << 10, 4 << 20, 64 << 20]


class Kernel:
    """One reducer, length and place of the result; a `bench.harness.Contest`."""

    def __init__(self, op: str, dtype: np.dtype, nbytes: int, place: str) -> None:
        count = max(1, nbytes // dtype.itemsize)
        # Values that stay what they are however often they are reduced, so that no call meets inf or subnormals.
        value = 0 if op in ("SUM", "BXOR", "LXOR") else 1
        new, a, b = (np.full(count, value, dtype) for _ in range(3))
        self.out = {"new": new, "a": a, "b": b}[place]
        raw = [array.view(carrier(dtype)) for array in (self.out, a, b)]
        self.calls: dict[str, Callable[[], None]] = {
            NUMPY: partial(UFUNCS[op], a, b, out=self.out),
            OURS: partial(reducer(op, dtype), *raw),
            COPY: partial(np.copyto, new.view(carrier(dtype)), raw[1]),
        }
        self.case = Case(f"kernel {op}", a.nbytes, count, dtype.name, 1, f"out={place}")
        self.value = value

    def wrong(self, contender: str) -> int:
        """Call it once more and count what is not the neutral value."""
        if contender == COPY:
            return 0
        self.calls[contender]()
        return int(np.count_nonzero(self.out != self.value))

    def detail(self, contender: str, medians: Mapping[str, float]) -> Mapping[str, Any]:
        """Return the share of the copy's bandwidth, counting every stream that is read or written."""
        return {"of_copy": round(1.5 * medians[COPY] / medians[contender], 3)}

    def close(self) -> None:
        """Nothing is held."""


def _dtype(name: str) -> np.dtype:
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)


def _contests(arguments: argparse.Namespace) -> Iterator[Callable[[], Kernel]]:
    for op in arguments.op:
        for dtype in map(_dtype, arguments.dtype):
            if reducer(op, dtype) is None:
                continue
            for nbytes in arguments.sizes:
                for place in arguments.out:
                    yield partial(Kernel, op, dtype, nbytes, place)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; exit status 1 if any element was wrong."""
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = make_parser("bench.kernels", __doc__)
    parser.set_defaults(sizes=_SIZES, seconds=0.3)
    names, some = [dtype.name for dtype in DTYPES], ["float32", "float64", "int32", "int64"]
    parser.add_argument("--op", nargs="+", choices=OPS, default=["SUM", "MAX"], help="default: %(default)s")
    parser.add_argument("--dtype", nargs="+", choices=names, default=some, help="default: %(default)s")
    parser.add_argument(
        "--out", nargs="+", choices=("new", "a", "b"), default=["new", "a"], help="default: %(default)s"
    )
    codecs = compression_kernels.specifications()
    parser.add_argument(
        "--codec", nargs="*", metavar="NAME", help="compressors, such as int4:block=128 (default: all of those known)"
    )
    parser.add_argument("--only", choices=("reducers", "codecs"), help="leave the others out")
    arguments = parser.parse_args(argv)
    contests: list[Callable[[], harness.Contest]] = []
    if arguments.only != "codecs":
        contests += _contests(arguments)
    if arguments.only != "reducers":
        chosen = codecs if arguments.codec is None else arguments.codec
        contests += compression_kernels.contests(chosen, arguments.sizes)
    return harness.run("bench.kernels", arguments, contests, argv, MPI.Intracomm(MPI.COMM_SELF))


if __name__ == "__main__":
    sys.exit(main())
