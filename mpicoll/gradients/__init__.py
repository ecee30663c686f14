"""Averaging gradients over ranks, in buckets, as they are or compressed, at once or while others are computed."""

from mpicoll.gradients.options import differing_ranks
from mpicoll.gradients.synchronizer import GradientSynchronizer

__all__ = ["GradientSynchronizer", "differing_ranks"]
