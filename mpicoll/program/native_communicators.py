"""Communicators of mpi4py that record their collective calls for a profile and are otherwise unchanged."""

# mypy: disable-error-code="override"

from __future__ import annotations

from functools import lru_cache
from typing import Any

from mpi4py import MPI

from mpicoll.communicator.predefined import is_predefined
from mpicoll.objects import pickling
from mpicoll.program import method_wrappers
from mpicoll.program.call_arguments import NAMES
from mpicoll.program.call_recorder import CallRecorder

_MAKERS = ("Split", "Split_type", "Dup", "Dup_with_info", "Clone", "Create", "Create_group", "Create_cart",
           "Create_graph", "Create_dist_graph", "Create_dist_graph_adjacent", "Sub")  # fmt: skip
_BASES = (MPI.Cartcomm, MPI.Graphcomm, MPI.Distgraphcomm, MPI.Intracomm)


def observed(comm: Any, recorder: CallRecorder) -> Any:
    """Return a handle of the communicator that records its calls; local.

    COMM_NULL and intercommunicators are returned unchanged.
    """
    base = next((each for each in _BASES if isinstance(comm, each)), None)
    if base is None or comm == MPI.COMM_NULL:
        return comm
    recorder.dumps = pickling.dumps
    made = _observed_class(base, recorder)(comm)
    recorder.stream_of(made)
    return made


@lru_cache(maxsize=8)
def _observed_class(base: type, recorder: CallRecorder) -> type:
    methods = {
        name: method_wrappers.noting(getattr(base, name), name, recorder, method_wrappers.observed_request(recorder))
        for name in NAMES
        if hasattr(base, name)
    }
    makers = {name: _making(getattr(base, name), recorder) for name in _MAKERS if hasattr(base, name)}
    others = {"free": _free, "__reduce__": _reduce, "__module__": base.__module__}
    return type(base.__name__, (base,), {**methods, **makers, **others})


def _making(method: Any, recorder: CallRecorder) -> Any:
    def make(self: Any, *arguments: Any, **named: Any) -> Any:
        return observed(method(self, *arguments, **named), recorder)

    return make


def _free(comm: Any) -> None:
    """Free a communicator that is not predefined, as mpi4py's ``free`` does."""
    if not is_predefined(comm):
        MPI.Intracomm.free(comm)


def _reduce(comm: Any) -> Any:
    """Pickle COMM_WORLD and COMM_SELF by name; other communicators raise ValueError, as in mpi4py."""
    for name in ("COMM_WORLD", "COMM_SELF"):
        if comm == getattr(MPI, name):
            return _predefined, (name,)
    raise ValueError(f"cannot pickle {comm!r}")


def _predefined(name: str) -> Any:
    return getattr(MPI, name)
