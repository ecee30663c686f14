"""Recorder of this rank's collective calls: call site, signature and times.

The first :data:`MAX_CALLS` calls of a communicator are recorded one by one, later ones only as sums. While the program
runs, the recorder makes no MPI calls but local ones, once a communicator. Times are seconds of
``time.perf_counter()``, a clock that on Linux all processes of a node share.
"""

from __future__ import annotations

import os
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np

from mpicoll.program.call_arguments import OBJECTS, Signature, quick_key, signature_of

MAX_CALLS = 500_000
"""Calls of a communicator that are recorded one by one, for comparison between ranks; later ones are only summed."""
MAX_KINDS = 20_000
"""Number of kinds of calls above which numbers of bytes are rounded up to powers of two."""
_PACKAGE = str(Path(__file__).parents[1]) + os.sep
_RUNNER = str(Path(__file__).parent) + os.sep
STREAM = "_profile_stream"
CALL = struct.Struct("=ddddq")
CALL_TYPE = np.dtype([*((name, np.float64) for name in ("entered", "blocked", "left", "spent")), ("kind", np.int64)])
"""Record of a call: time of entry; begin and end of its last wait (`blocked` and `left`; for a blocking call its own);
seconds `spent` in it in all; index of its kind."""
clock = time.perf_counter


class Stream:
    """Calls of one communicator, or starts of one persistent request, in the order in which all its ranks make them.

    Attributes
    ----------
    members : tuple of int
        The ranks of COMM_WORLD in the order of the communicator's ranks.
    number : tuple of int
        Index of the communicator among those of the same members, and index of the persistent request on it. Both
        begin at 1; the second is 0 for the communicator's own calls.
    """

    def __init__(self, members: tuple[int, ...], number: tuple[int, int]) -> None:
        self.members, self.number, self.size = members, number, len(members)
        self.calls = self.persistent = 0
        self._memory = bytearray(64 * CALL.size)

    def note(self, kind: int, entered: float, left: float) -> int:
        """Append a call and return its index, -1 if the stream is full."""
        place = self.calls
        if place >= MAX_CALLS:
            return -1
        start = place * CALL.size
        if start == len(self._memory):
            self._memory.extend(bytes(start))
        CALL.pack_into(self._memory, start, entered, entered, left, left - entered, kind)
        self.calls = place + 1
        return place

    def wait(self, place: int, begun: float, ended: float) -> None:
        """Add the time of a wait to the nonblocking call at index `place`."""
        start = place * CALL.size
        entered, _, _, spent, kind = CALL.unpack_from(self._memory, start)
        CALL.pack_into(self._memory, start, entered, begun, ended, spent + ended - begun, kind)

    def table(self) -> np.ndarray:
        """Return the calls as an array with the fields of :data:`CALL_TYPE`."""
        return np.frombuffer(bytes(self._memory[: self.calls * CALL.size]), CALL_TYPE)


@dataclass
class Kind:
    """Calls from one line of the program with one signature on one communicator.

    Attributes
    ----------
    sample
        The pickled argument of the first call, for collectives of objects.
    more_calls, more_seconds
        Number and total seconds of the calls that were not recorded one by one.
    """

    code: CodeType
    instruction: int
    signature: Signature
    size: int
    transport: str = ""
    sample: bytes | None = None
    more_calls: int = 0
    more_seconds: float = field(default=0.0)

    @property
    def line(self) -> int:
        """The line of the call."""
        lines = (line for start, stop, line in self.code.co_lines() if start <= self.instruction < stop)
        return next(lines, None) or self.code.co_firstlineno


class _Inside(threading.local):
    """State of a thread.

    Attributes
    ----------
    call
        Whether it is inside a collective: calls that it makes there are not the program's.
    begun
        When it began to wait for several requests; None outside such a wait. The first request that is complete takes
        the time.
    """

    call = False
    begun: float | None = None


class CallRecorder:
    """Recorder of all collective calls of this rank: its streams and kinds of calls."""

    def __init__(self, MPI: Any) -> None:
        self._world = MPI.Intracomm(MPI.COMM_WORLD).Get_group()
        self._undefined = MPI.UNDEFINED
        self._numbers: dict[tuple[int, ...], int] = {}
        self._places: dict[tuple[Any, ...], int] = {}
        self.kinds: list[Kind] = []
        self.streams: list[Stream] = []
        self.inside = _Inside()
        self.running = True
        self.transport: Callable[[Any, Signature], str] = lambda comm, signature: "MPI library"
        self.dumps: Callable[[Any], bytes] = lambda obj: b""

    def stop(self) -> None:
        """Stop recording."""
        self.running = False

    def stream_of(self, comm: Any) -> Stream:
        """Return the stream of a communicator; the first time, create it."""
        found: Stream | None = comm.__dict__.get(STREAM)
        if found is None:
            group = comm.Get_group()
            members = tuple(group.Translate_ranks(None, self._world))
            group.Free()
            self._numbers[members] = self._numbers.get(members, 0) + 1
            found = self._new_stream(members, (self._numbers[members], 0))
            setattr(comm, STREAM, found)
        return found

    def persistent_stream(self, stream: Stream) -> Stream:
        """Return a new stream, for the starts of a persistent request."""
        stream.persistent += 1
        return self._new_stream(stream.members, (stream.number[0], stream.persistent))

    def _new_stream(self, members: tuple[int, ...], number: tuple[int, int]) -> Stream:
        made = Stream(members, number)
        if self._undefined not in members:  # not with processes of other worlds
            self.streams.append(made)
        return made

    def kind_of(
        self, comm: Any, stream: Stream, frame: FrameType, name: str, arguments: tuple[Any, ...], result: Any
    ) -> int:
        """Return the index of a call's kind in `kinds`; a new kind is appended."""
        quick = quick_key(arguments, name in OBJECTS, result)
        if quick is None:
            return self._find(comm, stream, _of_program(frame), name, arguments, result)
        key = (id(frame.f_code), frame.f_lasti, name, stream.size, type(comm), quick)  # a new class, another transport
        place = self._places.get(key)
        if place is None:
            caller = _of_program(frame)
            place = self._find(comm, stream, caller, name, arguments, result)
            if caller is frame and len(self._places) < MAX_KINDS:
                self._places[key] = place
        return place

    def _find(
        self, comm: Any, stream: Stream, frame: FrameType, name: str, arguments: tuple[Any, ...], result: Any
    ) -> int:
        signature = signature_of(name, arguments, result)
        if len(self.kinds) > MAX_KINDS:
            signature = signature.rounded()
        code = frame.f_code
        key = (id(code), frame.f_lasti, len(stream.members), type(comm), signature.key)
        place = self._places.get(key)
        if place is None:
            place = self._places[key] = len(self.kinds)
            kind = Kind(code, frame.f_lasti, signature, len(stream.members), self.transport(comm, signature))
            if signature.holds_objects:
                kind.sample = signature.sample(arguments, self.dumps)
            self.kinds.append(kind)
        return place

    def note(self, stream: Stream, kind: int, entered: float, left: float) -> int:
        """Append a call to its stream, or to its kind's sums if the stream is full; see :meth:`Stream.note`."""
        place = stream.note(kind, entered, left)
        if place < 0:
            self.add(kind, left - entered)
        return place

    def add(self, kind: int, seconds: float, calls: int = 1) -> None:
        """Add calls and their seconds to the sums of a kind."""
        self.kinds[kind].more_calls += calls
        self.kinds[kind].more_seconds += seconds

    def forget_kinds(self, known: int) -> None:
        """Drop all kinds but the first `known`."""
        del self.kinds[known:]
        self._places = {key: place for key, place in self._places.items() if place < known}


def _of_program(frame: FrameType) -> FrameType:
    """Return the program's frame that made a call; a call by mpicoll itself, in a trainer say, is its caller's."""
    found: FrameType | None = frame
    while found is not None and found.f_code.co_filename.startswith(_PACKAGE):
        if found.f_code.co_filename.startswith(_RUNNER):
            return frame  # the program is a module of mpicoll
        found = found.f_back
    return found or frame
