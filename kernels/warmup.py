"""Compile the kernels beforehand, `python -m mpicoll.kernels.warmup`, so that no rank compiles while others wait.

What is compiled stays in Numba's cache, beside the source or in NUMBA_CACHE_DIR, for every later process.
"""

import argparse
import time
from collections.abc import Iterable, Sequence

import numpy as np
from numba import config, types

from . import atomics, calls, casts, executor, quantize, signs, table, updates, withdrawal
from .jit import compile_beforehand
from .reduce import DTYPES, OPS, reducer

WITH_KERNELS = (casts, quantize, signs, updates)
"""Modules whose kernels are made by `jit.kernel_for`: being imported here is what has them compiled."""


def warmup(pairs: Iterable[tuple[str, np.dtype]] | None = None, *, progress: bool = False) -> tuple[int, float]:
    """Compile and cache the reducers of `pairs`, by default of all ops and dtypes.

    Parameters
    ----------
    pairs : iterable of (op name, dtype), optional
        Pairs that do not apply are passed over.
    progress : bool
        Show a bar, where tqdm is installed.

    Returns
    -------
    tuple of int and float
        The number of reducers that are now ready, and the seconds that it took.
    """
    start = time.perf_counter()
    if pairs is None:
        pairs = [(op, dtype) for dtype in DTYPES for op in OPS]
    bar = _progress_bar(list(pairs)) if progress else pairs
    ready = sum(reducer(op, np.dtype(dtype)) is not None for op, dtype in bar)
    return ready, time.perf_counter() - start


def compile_shared() -> None:
    """Compile what collectives on shared memory need, for the types with which they are called."""
    if config.DISABLE_JIT:
        return
    word = types.int64
    for function, arguments in (
        (calls.call, (word,) * 6),
        (calls.call_in, (word,) * 7),
        (calls.begin_messages, (word,)),
        (executor.begin, (word,)),
        (executor.advance, (word,)),
        (withdrawal.withdraw, (word,)),
        (withdrawal.at_work, (word,)),
        (withdrawal.recorded, (word, word, word[::1])),
        (atomics.try_transfers, (word,) * 4),
    ):
        function.compile(arguments)
    atomics.self_test()
    table.layout_error()


def _progress_bar(pairs: list) -> Iterable:
    try:
        from tqdm import tqdm
    except ImportError:
        return pairs
    return tqdm(pairs, desc="kernels", unit="pair", leave=False, disable=None)


def main(argv: Sequence[str] | None = None) -> None:
    """Compile all kernels; say how many reducers there are and how long those took."""
    argparse.ArgumentParser(description=__doc__).parse_args(argv)
    compile_shared()
    begin = time.perf_counter()
    others = compile_beforehand()
    print(f"{others} kernels of compressors ready in {time.perf_counter() - begin:.1f} s")
    count, seconds = warmup(progress=True)
    print(f"{count} reducers ready in {seconds:.1f} s")


if __name__ == "__main__":
    main()
