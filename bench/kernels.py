"""Compare the reducers with a copy and with NumPy: `python -m bench.kernels`.

Each line is one reducer on arrays of one size. "touched" counts the bytes read and written: three streams for a
reduction, also in place, two for `np.copyto`. "ratio" is touched bandwidth over the copy's; 1 means as fast as memory
lets it be. Times are medians; the contestants take turns within each round, so that a busy moment hits all of them.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import ml_dtypes
import numpy as np

from mpicoll.kernels import DTYPES, OPS, carrier, reducer

_NUMPY = {
    "SUM": np.add,
    "PROD": np.multiply,
    "MAX": np.maximum,
    "MIN": np.minimum,
    "LAND": np.logical_and,
    "LOR": np.logical_or,
    "LXOR": np.logical_xor,
    "BAND": np.bitwise_and,
    "BOR": np.bitwise_or,
    "BXOR": np.bitwise_xor,
}
_SECONDS_PER_ROUND = 2e-4  # a round repeats a short call until it takes about this long
_COLUMNS = f"{'op':5} {'dtype':>10} {'bytes':>9} {'out':>8} {'GB/s':>7} {'copy':>7} {'ratio':>6} {'numpy':>7}"


def median_seconds(calls: Sequence[Callable[[], object]], rounds: int) -> list[float]:
    """Return the median time of each call; in every round each of them is timed once, one after the other."""
    repeats = [_repeats(call) for call in calls]
    samples: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for call, repeat, sample in zip(calls, repeats, samples, strict=True):
            sample.append(_time(call, repeat) / repeat)
    return [statistics.median(sample) for sample in samples]


def _repeats(call: Callable[[], object]) -> int:
    call()
    return max(1, int(_SECONDS_PER_ROUND / max(_time(call, 3) / 3, 1e-9)))


def _time(call: Callable[[], object], repeat: int) -> float:
    start = time.perf_counter()
    for _ in range(repeat):
        call()
    return time.perf_counter() - start


def report(op: str, dtype: np.dtype, nbytes: int, rounds: int) -> None:
    """Print one line for out of place, and one for each operand as `out`."""
    reduce = reducer(op, dtype)
    if reduce is None:
        return
    count = max(1, nbytes // dtype.itemsize)
    out, a, b = (_neutral(op, dtype, count) for _ in range(3))
    raw_out, raw_a, raw_b = (array.view(carrier(dtype)) for array in (out, a, b))
    places = {"new": (raw_out, raw_a, raw_b), "a": (raw_a, raw_a, raw_b), "b": (raw_b, raw_a, raw_b)}
    plain = {"new": out, "a": a, "b": b}
    calls: list[Callable[[], object]] = [lambda: np.copyto(raw_out, raw_a)]
    for where in places:
        calls += [partial(reduce, *places[where]), partial(_NUMPY[op], a, b, out=plain[where])]
    seconds = median_seconds(calls, rounds)
    copy = 2 * a.nbytes / seconds[0] / 1e9
    for where, ours, numpy in zip(places, seconds[1::2], seconds[2::2], strict=True):
        rates = [3 * a.nbytes / value / 1e9 for value in (ours, numpy)]
        numbers = f"{rates[0]:7.1f} {copy:7.1f} {rates[0] / copy:6.2f} {rates[1]:7.1f}"
        print(f"{op:5} {dtype.name:>10} {a.nbytes:9} {where:>8} {numbers}", flush=True)


def _neutral(op: str, dtype: np.dtype, count: int) -> np.ndarray:
    """Return values that stay what they are however often they are reduced, so that no run meets inf or subnormals."""
    return np.full(count, 0 if op in ("SUM", "BXOR", "LXOR") else 1, dtype)


def _dtype(name: str) -> np.dtype:
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", nargs="+", choices=OPS, default=["SUM", "MAX"], help="default: %(default)s")
    names = [dtype.name for dtype in DTYPES]
    some = ["float32", "float64", "int32", "int64"]
    parser.add_argument("--dtypes", nargs="+", choices=names, default=some, help="default: %(default)s")
    sizes = [16 << 10, 256 << 10, 64 << 20]
    parser.add_argument("--sizes", nargs="+", type=int, default=sizes, help="bytes of one array; default: %(default)s")
    parser.add_argument("--rounds", type=int, default=15, help="times that each is measured; default: %(default)s")
    arguments = parser.parse_args(argv)
    print(_COLUMNS)
    for op in arguments.ops:
        for name in arguments.dtypes:
            for nbytes in arguments.sizes:
                report(op, _dtype(name), nbytes, arguments.rounds)


if __name__ == "__main__":
    main()
