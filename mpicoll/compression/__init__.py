"""Compressors: float32 vectors to bytes and back. Knows no MPI."""

from mpicoll.compression import casts, integers, signs
from mpicoll.compression.base import Compressor, Key
from mpicoll.compression.feedback import ErrorFeedback
from mpicoll.compression.registry import compressor, names, register

__all__ = ["Compressor", "ErrorFeedback", "Key", "casts", "compressor", "integers", "names", "register", "signs"]
