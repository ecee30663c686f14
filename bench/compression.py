"""Allreduce of float32 with compressed messages, against MPI_Allreduce and against ours without compression.

``python -m bench.compression`` starts itself on 2 and on 8 ranks of this machine, where most compressors lose; ``python
-m bench.cluster --hosts 4 --ranks 1 --rate 1gbit -- -m bench.compression`` has links that are worth the effort, and
``make bench-compression`` runs all three. A line for each contender, or with ``--markdown`` a line of ratios for each
length:

- ``native``: the MPI library; ``dense``: ours, nothing compressed;
- a compressor, as ``compression=`` takes it; ``auto:int8`` compresses where that is faster;
- ``+EF``: one that needs error feedback, which is in its time. What it loses of one vector is added to the next.

``ratio`` is native's time over its own with the half width of its 95 % interval, ``payload`` the length of the first
rank's vector over that of what it is compressed to, ``rms error`` the error of the sum over the sum, both as root mean
squares, for independent normally distributed vectors without a residual yet. ``wrong`` counts elements that are
not the same bits on all ranks; all of them, if the error is larger than what one compression of each vector and one of
the sum can add up to. Vectors are written before each call, outside of the time.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from bench.benchmark_options import add_buffers, add_calls, is_launcher, make_parser, relaunch
from bench.operations import write
from bench.result_files import BACK_TO_BACK, ERROR, FEEDBACK, NATIVE, PAYLOAD, WRITTEN, Case
from mpicoll.compression import ErrorFeedback, Key, compressor, names

if TYPE_CHECKING:
    import numpy as np
    from mpi4py import MPI

    from mpicoll import Intracomm

DENSE, ALL = "dense", "all"
DEFAULT = (
    "fp16",
    "bf16",
    "int8",
    "int4",
    "sign",
    "topk:0.01",
    "oktopk:0.01",
    "randomk:0.01",
    "powersgd:4",
    "auto:int8",
)
"""Measured if they are registered."""
SIZES = [64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20]
_ROUNDING = 1e-6
_SLACK = 1.2
"""A compressor does a little better with one vector than with another."""


class Compressed:
    """One length and all contenders; a `bench.harness.Contest`."""

    def __init__(
        self, comms: tuple[Intracomm, MPI.Intracomm], nbytes: int, specs: Sequence[str], buffers: str = WRITTEN
    ) -> None:
        import numpy as np
        from mpi4py import MPI

        self.comm, self.plain = comms
        count = max(1, nbytes // 4)
        self.given = np.random.default_rng([self.comm.rank, count]).standard_normal(count, np.float32)
        self.result = np.zeros_like(self.given)
        self.exact = self.given.astype(np.float64)
        self.plain.Allreduce(MPI.IN_PLACE, self.exact)
        self.case = Case("compressed allreduce", 4 * count, count, "float32", self.comm.size, buffers=buffers)
        self.calls: dict[str, Callable[[], None]] = {
            NATIVE: partial(self.plain.Allreduce, self.given, self.result),
            DENSE: partial(self.comm.Allreduce, self.given, self.result),
        }
        self._losses: dict[str, tuple[float, float]] = {}
        self._errors: dict[str, float] = {}
        self._feedback: dict[str, ErrorFeedback] = {}
        for spec in specs:
            self._add(spec)

    def _add(self, spec: str) -> None:
        name = contender(spec)
        compression: str | ErrorFeedback = spec
        if name != spec:
            compression = self._feedback[name] = ErrorFeedback(spec)
        self.calls[name] = partial(self.comm.Allreduce, self.given, self.result, compression=compression)
        self._losses[name] = self._loss(spec)

    @property
    def before(self) -> Mapping[str, Callable[[], None]]:
        """Untimed write of this rank's vector before each call, by contender."""
        return dict.fromkeys(self.calls, partial(write, self.given)) if self.case.buffers == WRITTEN else {}

    def _loss(self, spec: str) -> tuple[float, float]:
        """Return how much shorter this rank's vector becomes, and the relative rms error, the largest of any rank."""
        import numpy as np
        from mpi4py import MPI

        codec = compressor(_candidate(spec))
        payload, out = np.empty(codec.wire_nbytes(self.given.size), np.uint8), np.empty_like(self.given)
        length = codec.compress(self.given, payload, Key(rank=self.comm.rank))
        codec.decompress(payload[:length], out)
        found = np.array([_rms(out - self.given) / _rms(self.given)])
        self.plain.Allreduce(MPI.IN_PLACE, found, MPI.MAX)
        return self.given.nbytes / max(1, length), float(found[0])

    def wrong(self, contender: str) -> int:
        """Call it once more; return how many elements differ between ranks, or all if the error is too large."""
        import numpy as np
        from mpi4py import MPI

        self.result[:] = 0
        if contender in self._feedback:
            self._feedback[contender].reset()  # the residual would count as an error
        self.calls[contender]()
        bits, ends = self.result.view(np.uint32), [np.empty(self.result.size, np.uint32) for _ in range(2)]
        for end, op in zip(ends, (MPI.MIN, MPI.MAX), strict=True):
            self.plain.Allreduce(bits, end, op)
        error = self._errors[contender] = _rms(self.result - self.exact) / _rms(self.exact)
        return int(np.count_nonzero(ends[0] != ends[1])) if error <= self._bound(contender) else self.result.size

    def _bound(self, contender: str) -> float:
        """Return what errors of all vectors, and then of the sum with them, add up to if all point the same way."""
        if contender in (NATIVE, DENSE):
            return _ROUNDING
        loss = _SLACK * self._losses[contender][1]
        together = loss * math.sqrt(self.comm.size)  # the vectors are independent
        return together + loss * (1 + together) + _ROUNDING

    def detail(self, contender: str, medians: Mapping[str, float]) -> Mapping[str, Any]:
        """Return what it is for: fewer bytes, and what that costs."""
        loss = self._losses.get(contender)
        packed = {PAYLOAD: round(loss[0], 2)} if loss is not None and self._errors[contender] > _ROUNDING else {}
        return {**packed, ERROR: float(f"{self._errors[contender]:.3g}")}

    def close(self) -> None:
        """Nothing is held."""


def contender(spec: str) -> str:
    """Return what a compressor is called in tables: those that need error feedback are measured with it."""
    whole = not spec.startswith("auto:")  # which takes none
    return spec + FEEDBACK if whole and compressor(spec).needs_feedback else spec


def _candidate(spec: str) -> str:
    return spec.removeprefix("auto:")


def _rms(x: np.ndarray) -> float:
    import numpy as np

    return float(np.sqrt(np.mean(np.square(x, dtype=np.float64))))


def specifications(wanted: Sequence[str]) -> list[str]:
    """Return what to measure.

    Raises
    ------
    ValueError
        If something is no compressor.
    """
    there = names()
    if ALL in wanted:
        return list(there)
    chosen = list(wanted) or [spec for spec in DEFAULT if _candidate(spec).partition(":")[0] in there]
    for spec in chosen:
        compressor(_candidate(spec))
    return chosen


def _contests(
    arguments: argparse.Namespace, comms: tuple[Intracomm, MPI.Intracomm]
) -> Iterator[Callable[[], Compressed]]:
    for nbytes in arguments.sizes:
        yield partial(Compressed, comms, nbytes, arguments.compression, arguments.buffers)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; exit status 1 if anything was wrong."""
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = make_parser("bench.compression", __doc__)
    parser.set_defaults(sizes=SIZES)
    usual = " ".join(DEFAULT)
    help_ = f"compressors to measure, or {ALL} (default, as far as they are there: {usual})"
    parser.add_argument("--compression", nargs="+", default=[], metavar="SPEC", help=help_)
    add_calls(parser, (BACK_TO_BACK,))
    add_buffers(parser)
    arguments = parser.parse_args(argv)
    try:
        arguments.compression = specifications(arguments.compression)
    except ValueError as error:
        parser.error(str(error))
    if is_launcher():
        return relaunch("bench.compression", arguments, argv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from mpi4py import MPI

    from bench import harness
    from mpicoll import Intracomm

    comms = Intracomm(MPI.COMM_WORLD), MPI.Intracomm(MPI.COMM_WORLD).Dup()
    return harness.run("bench.compression", arguments, list(_contests(arguments, comms)), argv, comms[1])


if __name__ == "__main__":
    sys.exit(main())
