"""Compressors: float32 vectors to bytes and back, independent of MPI.

The modules that define compressors are imported when the first one is asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from mpicoll.compression.aggregatable import Aggregatable
from mpicoll.compression.base import Compressor, Key
from mpicoll.compression.compressor_specs import MODULES, compressor, names, register
from mpicoll.compression.error_feedback import ErrorFeedback

if TYPE_CHECKING:
    from mpicoll.compression.sparsifiers import Sparsifier

__all__ = [
    "Aggregatable",
    "Compressor",
    "ErrorFeedback",
    "Key",
    "Sparsifier",
    "compressor",
    "names",
    "register",
]


def __getattr__(name: str) -> Any:
    if name == "Sparsifier":
        return import_module("mpicoll.compression.sparsifiers").Sparsifier
    if name in MODULES:
        return import_module(f"mpicoll.compression.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted((*__all__, *MODULES))
