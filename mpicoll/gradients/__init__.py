"""Averaging gradients over ranks, in buckets, as they are or compressed, at once or while others are computed."""

from mpicoll.gradients.synchronizer import GradientSynchronizer
from mpicoll.gradients.synchronizer_options import differing_ranks

__all__ = ["GradientSynchronizer", "differing_ranks"]
