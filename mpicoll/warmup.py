"""``python -m mpicoll warmup``: compile all kernels beforehand, so that no rank compiles while others wait.

Needs no launcher, and uses all cores by default. Compiled kernels stay on disk: beside the source, in NUMBA_CACHE_DIR,
or in the user's cache folder.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed

import numpy as np

from mpicoll.compression import Aggregatable, Compressor, ErrorFeedback, Key, compressor, names
from mpicoll.compression.sparsifiers import OkTopk
from mpicoll.environment import cores
from mpicoll.help_text import without_markup
from mpicoll.kernels import DTYPES, OPS, machine_code
from mpicoll.kernels import precompile as kernels
from mpicoll.kernels.codecs import topk
from mpicoll.kernels.compile_progress import PAUSE_SECONDS, show
from mpicoll.kernels.decorators import compile_beforehand

_COUNT = 5000
"""Elements of the vector that is compressed: several whole blocks and a partial one."""
_VALUES = {"error": "error:1e-3"}
"""Specifications of the compressors that need a setting."""
_ALSO = {"common": ("common:16",)}
"""Further specifications of a compressor, whose settings need kernels of their own."""
Item = tuple[str, str]
"""Kind of kernels, and a name within the kind: the unit of work of a process."""


def _compress(spec: str) -> None:
    """Send a vector through a compressor, to this process alone, with and without error feedback."""
    from mpi4py import MPI

    from mpicoll import Intracomm

    comm = Intracomm(MPI.COMM_SELF)
    for each in (spec, *_ALSO.get(spec, ())):
        for way in (each,) if compressor(each).unbiased else (each, ErrorFeedback(each)):
            comm.Allreduce(MPI.IN_PLACE, np.ones(_COUNT, np.float32), compression=way)
        _encode(compressor(each))


def _encode(made: Compressor) -> None:
    """Call what the parameter server calls, and what collectives call on several ranks only."""
    if isinstance(made, Aggregatable):
        return
    x, y = np.ones(_COUNT, np.float32), np.empty(_COUNT, np.float32)
    payload = np.empty(made.wire_nbytes(_COUNT), np.uint8)
    nbytes = made.compress(x, payload, Key(0, 0, 0))
    made.decompress(payload[:nbytes], y)
    made.decompress_add(payload[:nbytes], y)
    if isinstance(made, OkTopk):
        topk.largest(x, 1, np.empty(1, np.uint32), np.empty(1, np.float32))


def _train(dtype: str) -> None:
    """Call the kernels of the trainer's models and optimizers once, on arrays of zeros of this element type."""
    from mpicoll.kernels import network
    from mpicoll.optim.optimizers import OPTIMIZERS

    images, pooled = np.zeros((1, 2, 2, 1), dtype), np.zeros((1, 1, 1, 1), dtype)
    taken = np.zeros(pooled.shape, np.int8)
    network.softmax_cross_entropy(np.zeros((1, 2), dtype), np.zeros(1, np.int64))
    network.patches_3x3(images, np.zeros((4, 9), dtype))
    network.relu_pool_2x2(images, np.zeros(1, dtype), pooled, taken)
    network.relu_pool_2x2_backward(pooled, taken, images)
    for optimizer in OPTIMIZERS.values():
        optimizer(np.zeros(64, dtype)).apply(np.zeros(64, dtype), 0.0)


def compile_item(item: Item) -> Item:
    """Compile an item's kernels, or load them from the cache; return the item."""
    kind, name = item
    if kind == "shared memory":
        kernels.compile_shared()
    elif kind == "codecs":
        compile_beforehand()
    elif kind == "reducers":
        kernels.warmup([(name, dtype) for dtype in DTYPES])
    elif kind == "training":
        _train(name)
    else:
        _compress(name)
    return item


def _all(futures: Iterable[Future[Item]], total: int) -> None:
    """Wait for all futures; show progress, on a line of its own every now and then where there is no terminal."""
    spoke = time.monotonic()
    for ready, future in enumerate(futures, 1):
        future.result()
        text = f"kernels: {ready} of {total} groups ready"
        show(text)
        if not sys.stderr.isatty() and time.monotonic() - spoke > PAUSE_SECONDS:
            sys.stderr.write(f"{text}\n")
            spoke = time.monotonic()
    show("")


def compile_all(items: Sequence[Item], processes: int) -> None:
    """Compile items in `processes` processes; a kernel that two items need is compiled once.

    An exception, such as that of an interrupt, ends the processes at once.
    """
    if processes == 1:
        for item in items:
            compile_item(item)
        return
    spawn = multiprocessing.get_context("spawn")  # MPI does not survive a fork
    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(processes, mp_context=spawn, initializer=_end_with_parent)
    try:
        _all(as_completed(_submitted(pool, items)), len(items))
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in set(multiprocessing.active_children()) - others:
            process.kill()  # entries on disk are complete at any time, and the system gives locks back
        raise
    pool.shutdown()


def _submitted(pool: ProcessPoolExecutor, items: Iterable[Item]) -> list[Future[Item]]:
    """Start the processes and hand over the items; the processes never see an interrupt, which this one handles.

    A terminal interrupts the whole group of processes. Those started here take over that the signal is blocked.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return [pool.submit(compile_item, item) for item in items]
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end_with_parent() -> None:
    """Let this process end when the one that started it does, however that ends."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _obstacle() -> str:
    """Return why nothing that is compiled could be kept, "" if it can."""
    if machine_code.folder_to_write() is not None:
        return ""
    folders = " and ".join(repr(str(folder)) for folder in machine_code.folders())
    if os.environ.get("NUMBA_CACHE_DIR"):
        return f"NUMBA_CACHE_DIR: nothing can be kept in {folders}, which cannot be written"
    return f"nothing can be kept: {folders} cannot be written by this user alone; set NUMBA_CACHE_DIR to a folder"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return the exit status: 0, 1 if no folder can be written, or 130 after an interrupt.

    Raises
    ------
    SystemExit
        With status 2 for an unknown compressor or wrong option.
    """
    parser = argparse.ArgumentParser(
        prog="python -m mpicoll warmup",
        description=without_markup(__doc__),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    every = [_VALUES.get(name, name) for name in names()]
    help_ = "compressors whose kernels are compiled (default: all; none for the option without a value)"
    parser.add_argument("--compression", nargs="*", default=every, metavar="SPEC", help=help_)
    how_many = "number of processes that compile (default: one for each core)"
    parser.add_argument("--processes", type=int, default=cores(), help=how_many)
    arguments = parser.parse_args(argv)
    if arguments.processes < 1:
        parser.error(f"--processes: must be at least 1, not {arguments.processes}")
    try:
        for spec in arguments.compression:
            compressor(spec)
    except ValueError as error:
        parser.error(f"--{error}")
    wrong = _obstacle()
    if wrong:
        sys.stderr.write(f"mpicoll warmup: {wrong}\n")
        return 1
    begin = time.perf_counter()
    os.environ["MPICOLL_PROGRESS"] = "off"  # the processes that compile need not speak
    items = [("shared memory", ""), ("codecs", ""), *(("reducers", op) for op in OPS)]
    items += [("training", dtype) for dtype in ("float32", "float64")]
    items += [("compressor", spec) for spec in arguments.compression]
    try:
        compile_all(items, arguments.processes)
    except KeyboardInterrupt:
        show("")
        sys.stderr.write("mpicoll warmup: interrupted; what is compiled is kept\n")
        return 128 + signal.SIGINT
    ready = len(arguments.compression)
    text = f"shared memory, reducers, training and {ready} compressor{'s' * (ready != 1)} ready"
    sys.stdout.write(f"{text} in {time.perf_counter() - begin:.1f} s\n")
    return 0
