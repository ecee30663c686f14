"""Compressors: float32 vectors to bytes and back. Knows no MPI."""

from mpicoll.compression import casts, integers, randomized, signs, sparse
from mpicoll.compression.base import Compressor, Key
from mpicoll.compression.feedback import ErrorFeedback
from mpicoll.compression.registry import compressor, names, register
from mpicoll.compression.sparse import Sparsifier

__all__ = [
    "Compressor",
    "ErrorFeedback",
    "Key",
    "Sparsifier",
    "casts",
    "compressor",
    "integers",
    "names",
    "randomized",
    "register",
    "signs",
    "sparse",
]
