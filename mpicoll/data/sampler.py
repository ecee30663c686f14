"""Sampler: a permutation of the samples for each epoch, cut into batches, and each batch into a part for each rank.

Every rank computes the same permutation, so nothing is sent, and a batch holds the same samples on any number of ranks.
Each sample is used exactly once in an epoch::

    order    7 2 9 | 0 5 1 | 8 3 6 | 4          10 samples, batch 3: the last batch is short
    rank 0   7 2     0 5     8 3     4
    rank 1       9       1       6              nothing in the last batch, but it takes part
"""

from __future__ import annotations

import numpy as np


def epoch_order(count: int, seed: int, epoch: int) -> np.ndarray:
    """Return a random permutation of ``0 .. count - 1``, determined by the arguments.

    Returns
    -------
    (count,) of int32, or of int64 if `count` is 2**31 or more
    """
    order = np.arange(count, dtype=np.int32 if count < 2**31 else np.int64)
    np.random.default_rng((seed, epoch)).shuffle(order)
    return order


def steps_per_epoch(count: int, batch: int) -> int:
    """Return the number of batches of an epoch; the last one may be short."""
    return -(-count // batch)


def part(count: int, size: int, rank: int) -> tuple[int, int]:
    """Return start and stop of a rank's part of `count` items; parts differ by at most one item."""
    quotient, remainder = divmod(count, size)
    start = rank * quotient + min(rank, remainder)
    return start, start + quotient + (rank < remainder)


def batch_of(order: np.ndarray, step: int, batch: int) -> np.ndarray:
    """Return the samples of batch number `step`, a view into `order`."""
    return order[step * batch : (step + 1) * batch]


def batch_of_rank(order: np.ndarray, step: int, batch: int, size: int, rank: int) -> tuple[np.ndarray, int]:
    """Return the samples of `rank` in batch number `step`.

    Returns
    -------
    indices : view into `order`
        The samples of this rank, possibly none.
    count : int
        The number of samples in the whole batch, over all ranks.
    """
    whole = batch_of(order, step, batch)
    start, stop = part(len(whole), size, rank)
    return whole[start:stop], len(whole)
