"""Compressors: float32 vectors to bytes and back. Knows no MPI."""

from mpicoll.compression import (
    bounded,
    casts,
    common,
    fp8,
    integers,
    natural,
    powersgd,
    qsgd,
    randomized,
    signs,
    sparse,
    ternary,
)
from mpicoll.compression.base import Compressor, Key
from mpicoll.compression.feedback import ErrorFeedback
from mpicoll.compression.registry import compressor, names, register
from mpicoll.compression.sparse import Sparsifier
from mpicoll.compression.summed import Summed

__all__ = [
    "Compressor",
    "ErrorFeedback",
    "Key",
    "Sparsifier",
    "Summed",
    "bounded",
    "casts",
    "common",
    "compressor",
    "fp8",
    "integers",
    "names",
    "natural",
    "powersgd",
    "qsgd",
    "randomized",
    "register",
    "signs",
    "sparse",
    "ternary",
]
