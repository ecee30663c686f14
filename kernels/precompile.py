"""Compile the kernels beforehand, `python -m mpicoll.kernels.precompile`, so that no rank compiles while others wait.

What is compiled stays on disk, see `machine_code`, for every later process.
"""

import argparse
import importlib
import time
from collections.abc import Iterable, Sequence

import numpy as np

from . import (
    allocator,
    atomics,
    counted_parts,
    dispatch_table,
    network_layers,
    object_kernels,
    optimizer_updates,
    quantized_layers,
)
from .codecs import cast_codec, integer_codec, sign_codec, sparse_codec
from .compile_progress import show
from .decorators import DISABLED, compile_beforehand
from .reduce import DTYPES, OPS, reducer

WITH_KERNELS = (
    cast_codec,
    integer_codec,
    sign_codec,
    sparse_codec,
    network_layers,
    optimizer_updates,
    quantized_layers,
)
"""Modules whose kernels are made by `decorators.kernel_for`: being imported here is what has them compiled."""
_COLLECTIVES = (
    "announce",
    "atomics",
    "block_exchange",
    "block_offers",
    "builtin_objects",
    "compared_calls",
    "composition",
    "counted_calls",
    "counted_parts",
    "dispatch",
    "dispatch_table",
    "driven_jobs",
    "exchange_methods",
    "executor",
    "known_reductions",
    "method_trials",
    "nonblocking_calls",
    "object_calls",
    "object_parts",
    "object_reductions",
    "one_rank_calls",
    "packed_views",
    "exchange_calls",
    "strided_copy",
    "typed_specs",
    "uneven_calls",
    "uneven_parts",
    "vector_checks",
    "withdrawal",
)
"""Modules whose kernels collectives use."""


def warmup(pairs: Iterable[tuple[str, np.dtype]] | None = None, *, progress: bool = False) -> tuple[int, float]:
    """Compile and cache the reducers of `pairs`, by default of all ops and dtypes.

    Parameters
    ----------
    pairs : iterable of (op name, dtype), optional
        Pairs that do not apply are passed over.
    progress : bool
        Show how many are ready, where standard error is a terminal.

    Returns
    -------
    tuple of int and float
        The number of reducers that are now ready, and the seconds that it took.
    """
    start = time.perf_counter()
    if pairs is None:
        pairs = [(op, dtype) for dtype in DTYPES for op in OPS]
    ready = 0
    for done, (op, dtype) in enumerate(pairs, 1):
        ready += reducer(op, np.dtype(dtype)) is not None
        if progress:
            show(f"reducers: {done} pairs ready")
    return ready, time.perf_counter() - start


def compile_shared() -> None:
    """Compile what collectives on shared memory need, for the types with which they are called."""
    if DISABLED:
        return
    for name in _COLLECTIVES:
        compile_beforehand(importlib.import_module(f"{__package__}.{name}").__name__)
    own = allocator.allocate, allocator.allocate_zeros, allocator.resize, allocator.release
    for function in (*own, counted_parts.exchange_parts):
        function.address  # noqa: B018, compiles it
    for kernel in object_kernels.made:
        kernel.load()
    atomics.self_test()
    dispatch_table.layout_error()


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
