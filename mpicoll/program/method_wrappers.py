"""Wrappers of collective methods that record calls in a :class:`~mpicoll.program.call_recorder.CallRecorder`."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

from mpicoll.collectives.select import NATIVE
from mpicoll.interface.communicator_state import with_subclasses
from mpicoll.program.call_arguments import NAMES, OBJECTS, Signature, ordered
from mpicoll.program.call_recorder import STREAM, CallRecorder, Stream, clock

_CALL = "_profile_call"
"""Attribute of a request: stream, place and kind of the call that made it."""
_Noted = tuple[Stream, int, int]
_LIBRARY = "MPI library"
WAITS = ("Wait", "wait", "Test", "test", "Get_status", "get_status")


def timed(method: Callable[..., Any], name: str, recorder: CallRecorder) -> Callable[..., Any]:
    """Return a blocking collective that records its calls; calls made inside another collective are not recorded."""
    inside = recorder.inside

    @functools.wraps(method)
    def call(self: Any, *arguments: Any, **named: Any) -> Any:
        if inside.call or not recorder.running:
            return method(self, *arguments, **named)
        result = None
        inside.call = True
        entered = clock()
        try:
            result = method(self, *arguments, **named)
        finally:
            left = clock()
            inside.call = False
            stream = self.__dict__.get(STREAM) or recorder.stream_of(self)
            given = ordered(name, arguments, named) if named else arguments
            kind = recorder.kind_of(self, stream, sys._getframe(1), name, given, result)
            if stream.note(kind, entered, left) < 0:
                recorder.add(kind, left - entered)
        return result

    return call


def starting(
    method: Callable[..., Any], name: str, recorder: CallRecorder, wrap: Callable[[Any], Any]
) -> Callable[..., Any]:
    """Return a nonblocking or persistent collective that records its calls and marks its request."""
    inside = recorder.inside
    persistent = name.endswith("_init")

    @functools.wraps(method)
    def call(self: Any, *arguments: Any, **named: Any) -> Any:
        if not recorder.running or inside.call:
            return method(self, *arguments, **named)
        stream = recorder.stream_of(self)
        inside.call = True
        entered = clock()
        try:
            request = method(self, *arguments, **named)
        finally:
            inside.call = False
        left = clock()
        kind = recorder.kind_of(self, stream, sys._getframe(1), name, ordered(name, arguments, named), None)
        request = wrap(request)
        if persistent:
            request.__dict__[_CALL] = recorder.persistent_stream(stream), -1, kind
        else:
            request.__dict__[_CALL] = stream, recorder.note(stream, kind, entered, left), kind
        return request

    return call


def waiting(method: Callable[..., Any], recorder: CallRecorder) -> Callable[..., Any]:
    """Return a waiting or testing method of a request that adds its time to the recorded call."""

    def add(request: Any, noted: _Noted, begun: float, ended: float) -> None:
        stream, place, kind = noted
        if place >= 0:
            stream.wait(place, begun, ended)
        else:
            recorder.add(kind, ended - begun, calls=0)

    return _of_noted(method, recorder, add)


def beginning(method: Callable[..., Any], recorder: CallRecorder) -> Callable[..., Any]:
    """Return ``Start`` of a persistent request, recorded as a call at the line that created the request."""

    def note(request: Any, noted: _Noted, entered: float, left: float) -> None:
        stream, _, kind = noted
        request.__dict__[_CALL] = stream, recorder.note(stream, kind, entered, left), kind

    return _of_noted(method, recorder, note)


def _of_noted(
    method: Callable[..., Any], recorder: CallRecorder, note: Callable[[Any, _Noted, float, float], None]
) -> Callable[..., Any]:
    """Return a method of a request that calls `note` with its times if the request's call was recorded."""
    inside = recorder.inside

    @functools.wraps(method)
    def call(self: Any, *arguments: Any, **named: Any) -> Any:
        noted: _Noted | None = self.__dict__.get(_CALL)
        if noted is None or not recorder.running or inside.call:
            return method(self, *arguments, **named)
        inside.call = True
        begun, inside.begun = clock() if inside.begun is None else inside.begun, None
        try:
            return method(self, *arguments, **named)
        finally:
            ended = clock()
            inside.call = False
            note(self, noted, begun, ended)

    return call


def waiting_for_several(method: Callable[..., Any], recorder: CallRecorder) -> Callable[..., Any]:
    """Return a method that waits for several requests; its time belongs to the first of them that is complete then."""
    inside = recorder.inside

    @functools.wraps(method)
    def call(*arguments: Any) -> Any:
        inside.begun = clock()
        try:
            return method(*arguments)
        finally:
            inside.begun = None

    return call


def wrap_classes(recorder: CallRecorder) -> None:
    """Wrap the methods of mpicoll's communicators and requests, for the rest of the process."""
    from mpicoll import comm
    from mpicoll.collectives import request_lists, requests, shared_requests
    from mpicoll.objects import pickling
    from mpicoll.program import library_first

    del shared_requests  # imported for its classes of requests
    recorder.transport, recorder.dumps = _transport, pickling.dumps
    observed = _observed(recorder)
    for cls in dict.fromkeys(base for kind in comm.CLASSES.values() for base in kind.__mro__):
        if cls.__module__.startswith("mpicoll."):
            for name in NAMES.keys() & vars(cls).keys():
                setattr(cls, name, noting(vars(cls)[name], name, recorder, observed))
    for cls in library_first.classes.values():
        for name in NAMES.keys() & vars(cls).keys():
            setattr(cls, name, noting(vars(cls)[name], name, recorder, observed))
    made = comm.Intracomm.__init__

    @functools.wraps(made)
    def make(self: Any, *arguments: Any, **named: Any) -> None:
        made(self, *arguments, **named)
        recorder.stream_of(self)

    comm.Intracomm.__init__ = make  # type: ignore[method-assign]
    mixed = request_lists.MixedRequests
    mixed.until = waiting_for_several(mixed.until, recorder)  # type: ignore[method-assign]
    for cls in with_subclasses(requests.Request):
        for name in WAITS:
            if name in vars(cls):
                setattr(cls, name, waiting(vars(cls)[name], recorder))
        if "Start" in vars(cls):
            setattr(cls, "Start", beginning(vars(cls)["Start"], recorder))  # noqa: B010  # mypy: a method


def observed_request(recorder: CallRecorder) -> Any:
    """Return a function that turns a request into one that records its waits."""
    classes = {}
    for base in (MPI.Prequest, MPI.Request):
        methods = {name: waiting(getattr(base, name), recorder) for name in WAITS}
        if base is MPI.Prequest:
            methods["Start"] = beginning(MPI.Prequest.Start, recorder)
        classes[base] = type(base.__name__, (base,), {**methods, "__module__": base.__module__})

    def wrap(request: MPI.Request) -> MPI.Request:
        made: MPI.Request = classes[MPI.Prequest if isinstance(request, MPI.Prequest) else MPI.Request](request)
        return made

    return wrap


def _observed(recorder: CallRecorder) -> Callable[[Any], Any]:
    """Return a function that turns a request of mpi4py's, but not one of mpicoll's, into one that records its waits."""
    from mpicoll.collectives.requests import Request

    observed = observed_request(recorder)
    return lambda request: request if isinstance(request, Request) else observed(request)


def noting(
    method: Callable[..., Any], name: str, recorder: CallRecorder, wrap: Callable[[Any], Any]
) -> Callable[..., Any]:
    """Return a method of any form that records its calls; `wrap` turns its request into one that records waits."""
    if name in OBJECTS or NAMES[name] == name:
        return timed(method, name, recorder)
    return starting(method, name, recorder, wrap)


def _transport(comm: Any, signature: Signature) -> str:
    """Return the algorithm that "auto" selects for a call; "objects" for a collective of objects."""
    from mpicoll.program import library_requests

    if signature.method in OBJECTS and signature.method != "barrier":
        return "objects"
    if library_requests.are_library(signature.method):
        return _LIBRARY
    name = "alltoallv" if signature.method == "Alltoallw" else signature.collective.lower()  # blocks of bytes
    try:
        choice = str(comm.choice(name, max(0, signature.nbytes)))
    except Exception:  # a collective that the MPI library makes
        return _LIBRARY
    return _LIBRARY if choice == NATIVE else choice


class _Nothing:
    """Stand-in for a communicator, with a call that does nothing."""

    def Allreduce(self, sendbuf: Any, recvbuf: Any) -> None:
        return None


def overhead(recorder: CallRecorder) -> float:
    """Return the approximate seconds that recording adds to a call, measured with a call that does nothing."""
    bare, known, running = _Nothing(), len(recorder.kinds), recorder.running
    setattr(bare, STREAM, Stream((0,), (0, 0)))
    noted = timed(_Nothing.Allreduce, "Allreduce", recorder)
    data = np.ones(4)
    recorder.running = True
    seconds = [
        _seconds(lambda: noted(bare, data, data)) - _seconds(lambda: bare.Allreduce(data, data)) for _ in range(5)
    ]
    recorder.running = running
    recorder.forget_kinds(known)
    return max(0.0, min(seconds))


def _seconds(call: Callable[[], Any], calls: int = 2000) -> float:
    begun = clock()
    for _ in range(calls):
        call()
    return (clock() - begun) / calls
