"""Fast, explainable collectives for mpi4py programs, and data-parallel training on top of them.

>>> comm = mpicoll.Intracomm(MPI.COMM_WORLD)      # a subclass of MPI.Intracomm
>>> comm.Allreduce(MPI.IN_PLACE, x)

Names are loaded on first use: importing mpicoll starts neither MPI nor Numba, so ``python -m mpicoll explain``
and tools that only read schedules work on a machine without MPI.

Raises
------
ImportError
    In a source checkout that is not installed, where part of the package lies elsewhere.
"""

from __future__ import annotations

import atexit
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpicoll import errors
    from mpicoll.buffers.reduction_ops import op
    from mpicoll.collectives.requests import Request
    from mpicoll.comm import Cartcomm, Distgraphcomm, Graphcomm, Intercomm, Intracomm
    from mpicoll.compression import ErrorFeedback, compressor
    from mpicoll.gradients import GradientSynchronizer
    from mpicoll.parallel.sharded_optimizer import ShardedOptimizer
    from mpicoll.parameter_server import ParameterServer
    from mpicoll.shared_memory.numpy_allocator import shared_arrays

__version__ = "0.1.0"
__all__ = [
    "Cartcomm",
    "Distgraphcomm",
    "ErrorFeedback",
    "GradientSynchronizer",
    "Graphcomm",
    "Intercomm",
    "Intracomm",
    "ParameterServer",
    "Request",
    "ShardedOptimizer",
    "__version__",
    "compressor",
    "errors",
    "op",
    "shared_arrays",
]

_HOME = {
    "Cartcomm": "mpicoll.comm",
    "Distgraphcomm": "mpicoll.comm",
    "ErrorFeedback": "mpicoll.compression",
    "Graphcomm": "mpicoll.comm",
    "Intercomm": "mpicoll.comm",
    "Intracomm": "mpicoll.comm",
    "GradientSynchronizer": "mpicoll.gradients",
    "ParameterServer": "mpicoll.parameter_server",
    "Request": "mpicoll.collectives.requests",
    "ShardedOptimizer": "mpicoll.parallel.sharded_optimizer",
    "compressor": "mpicoll.compression",
    "op": "mpicoll.buffers.reduction_ops",
    "shared_arrays": "mpicoll.shared_memory.numpy_allocator",
}

if find_spec("mpicoll.kernels") is None:
    # With a name, `python -m mpicoll` prints the message alone, without a traceback.
    raise ImportError(
        f"mpicoll: this is a source checkout that is not installed; run `pip install -e {Path(__file__).parents[1]}`, "
        "or leave its folder to use an mpicoll that is installed elsewhere",
        name="mpicoll",
    )


@atexit.register  # before all other handlers of mpicoll, which may make collectives; the last one runs first
def _leave_collectives_to_library() -> None:
    if "mpicoll.comm" in sys.modules:
        from mpicoll.interface.library_at_exit import leave_to_library

        leave_to_library(sys.modules["mpicoll.comm"].Intracomm)


def __getattr__(name: str) -> Any:
    if name == "errors":
        return import_module("mpicoll.errors")
    if name not in _HOME:
        raise AttributeError(f"module 'mpicoll' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
