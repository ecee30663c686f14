"""Averaging of gradients over ranks, in buckets, with or without compression, during or after the backward pass."""

from mpicoll.gradients.synchronizer import GradientSynchronizer
from mpicoll.gradients.synchronizer_options import differing_ranks

__all__ = ["GradientSynchronizer", "differing_ranks"]
