"""Timing for the examples: two functions run in turn, and the medians are compared."""

from statistics import median
from time import perf_counter

from mpi4py import MPI


def compare(what, plain, ours, rounds=9, seconds=2.0):
    """Time two functions in turn and let rank 0 print their medians and the ratio.

    Parameters
    ----------
    what : str
        Name of the part of the program that is timed.
    plain, ours : callable
        The part with plain mpi4py and with mpicoll. Every rank calls both.
    rounds : int
        How often each of them is timed at most, after one call that warms it up.
    seconds : float
        No further round starts after this time, but three are always made.
    """
    comm = MPI.COMM_WORLD
    plain(), ours()
    times = []
    while len(times) < 3 or (len(times) < rounds and sum(map(sum, times)) < seconds):
        times.append([])
        for function in (plain, ours):
            comm.Barrier()
            start = perf_counter()
            function()
            # The slowest rank decides how long a parallel program takes.
            times[-1].append(comm.allreduce(perf_counter() - start, MPI.MAX))
    before, after = map(median, zip(*times, strict=True))
    if comm.rank == 0:
        remark = "" if before > after else " (mpicoll is not faster here)"
        print(f"{what}: mpi4py {1e3 * before:.2f} ms, mpicoll {1e3 * after:.2f} ms, ratio {before / after:.2f}{remark}")
