"""Timing of several functions in turns, on all ranks.

A sample is a batch of calls on all ranks after a barrier. Its time is that of the slowest rank, divided by the number
of calls. The functions are timed in turn, sample by sample, so that other load of the machine affects all of them
alike. Their order is random in each turn, since a function's time depends on the caches that the one before it leaves.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from mpi4py import MPI

WARMUP_CALLS = 10
SAMPLE_SECONDS = 300e-6
MIN_SAMPLES, MAX_SAMPLES = 7, 200


@dataclass(frozen=True)
class Timing:
    """Measured times of one function.

    Attributes
    ----------
    samples : (count,) float64
        Seconds per call, the maximum over the ranks, one value a sample.
    calls : int
        Calls in a sample, of which its value is the mean.
    """

    samples: np.ndarray
    calls: int = 1

    @property
    def median(self) -> float:
        """The median of `samples`, in seconds."""
        return float(np.median(self.samples))


def _agreed(comm: MPI.Intracomm, value: float) -> float:
    result = np.array([value])
    comm.Allreduce(MPI.IN_PLACE, result, MPI.MAX)
    return float(result[0])


def _batch(comm: MPI.Intracomm, call: Callable[[], None], calls: int) -> float:
    comm.Barrier()
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - begin) / calls


def turns(names: Iterable[str], count: int) -> Iterator[list[str]]:
    """Yield `count` random permutations of the names, the same on all ranks and in every run."""
    order, lot = list(names), random.Random(0)
    for _ in range(count):
        lot.shuffle(order)
        yield list(order)


def compare(
    comm: MPI.Intracomm,
    contenders: Mapping[str, Callable[[], None]],
    seconds: float,
    sample_seconds: float = SAMPLE_SECONDS,
) -> dict[str, Timing]:
    """Return the timing of each function, by name; collective over `comm`.

    Parameters
    ----------
    comm
        A communicator of mpi4py.
    contenders
        Functions without arguments, the same names in the same order on every rank.
    seconds
        Approximate duration of all samples together. At least 7 samples of each function are taken, at most 200.
    sample_seconds
        Approximate duration of a sample, in which short calls are repeated.
    """
    calls, estimates = {}, {}
    for name, call in contenders.items():
        _batch(comm, call, 1)
        once = _agreed(comm, _batch(comm, call, 2))
        # Long calls need fewer warm-up calls to have been warmed up as long.
        warm = _batch(comm, call, max(1, min(WARMUP_CALLS, int(0.5 / once))))
        once = min(once, _agreed(comm, warm))  # a busy moment would leave too few calls in a sample
        calls[name] = max(1, int(sample_seconds / once))
        estimates[name] = once * calls[name]
    wanted = seconds / sum(estimates.values())
    count = int(_agreed(comm, min(MAX_SAMPLES, max(MIN_SAMPLES, wanted))))
    samples = {name: np.empty(count) for name in contenders}
    for number, names in enumerate(turns(contenders, count)):
        for name in names:
            samples[name][number] = _batch(comm, contenders[name], calls[name])
    for values in samples.values():
        comm.Allreduce(MPI.IN_PLACE, values, MPI.MAX)
    return {name: Timing(values, calls[name]) for name, values in samples.items()}
