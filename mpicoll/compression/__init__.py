"""Compressors: float32 vectors to bytes and back, independent of MPI."""

from mpicoll.compression import (
    bounded,
    casts,
    fp8,
    integers,
    natural,
    powersgd,
    qsgd,
    randomized,
    shared_scale,
    signs,
    sparsifiers,
    ternary,
)
from mpicoll.compression.aggregatable import Aggregatable
from mpicoll.compression.base import Compressor, Key
from mpicoll.compression.compressor_specs import compressor, names, register
from mpicoll.compression.error_feedback import ErrorFeedback
from mpicoll.compression.sparsifiers import Sparsifier

__all__ = [
    "Aggregatable",
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
    "powersgd",
    "qsgd",
    "randomized",
    "register",
    "shared_scale",
    "signs",
    "sparsifiers",
    "ternary",
]
