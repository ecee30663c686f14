"""Compressors: float32 vectors to bytes and back. Knows no MPI."""

from mpicoll.compression import bounded, casts, fp8, integers, natural, qsgd, randomized, signs, sparse, ternary
from mpicoll.compression.base import Compressor, Key
from mpicoll.compression.feedback import ErrorFeedback
from mpicoll.compression.registry import compressor, names, register
from mpicoll.compression.sparse import Sparsifier

__all__ = [
    "Compressor",
    "ErrorFeedback",
    "Key",
    "Sparsifier",
    "bounded",
    "casts",
    "compressor",
    "fp8",
    "integers",
    "names",
    "natural",
    "qsgd",
    "randomized",
    "register",
    "signs",
    "sparse",
    "ternary",
]
