"""Transfer of call records to rank 0: a JSON header and arrays of numbers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from mpi4py import MPI

from mpicoll.communicator.predefined import WORLD
from mpicoll.program.call_recorder import CallRecorder, Kind, Stream
from mpicoll.program.program_clock import Drift

_TIMES = ("entered", "blocked", "left", "spent")
_HEADER, _NUMBERS, _KINDS = range(3)


@dataclass
class CallStream:
    """One rank's calls on one communicator as arrays, one element a call.

    The fields are those of :class:`~mpicoll.program.call_recorder.Stream` and
    :data:`~mpicoll.program.call_recorder.CALL_TYPE`, with times in seconds of rank 0's clock.
    """

    members: tuple[int, ...]
    number: tuple[int, int]
    entered: np.ndarray
    blocked: np.ndarray
    left: np.ndarray
    spent: np.ndarray
    kinds: np.ndarray


@dataclass
class RankRecord:
    """Record of one rank: facts about its run, kinds of calls (dictionaries of :func:`describe`) and streams."""

    rank: int
    facts: dict[str, Any]
    kinds: list[dict[str, Any]]
    streams: list[CallStream]


def describe(kind: Kind) -> dict[str, Any]:
    """Return a kind of calls as a dictionary for JSON."""
    signature = kind.signature
    nbytes = len(kind.sample) if signature.nbytes < 0 and kind.sample is not None else signature.nbytes
    return {
        "file": kind.code.co_filename,
        "line": kind.line,
        "function": getattr(kind.code, "co_qualname", kind.code.co_name),
        "method": signature.method,
        "collective": signature.collective,
        "nbytes": nbytes,
        "dtype": signature.dtype,
        "op": _name_of(signature.op),
        "root": signature.root if isinstance(signature.root, int) else 0,
        "size": kind.size,
        "transport": kind.transport,
        "more_calls": kind.more_calls,
        "more_seconds": kind.more_seconds,
    }


def _name_of(op: Any) -> str:
    """Return the name of a predefined operation, "" for None, "own" for others."""
    if op is None:
        return ""
    for name in ("SUM", "PROD", "MAX", "MIN", "LAND", "LOR", "LXOR", "BAND", "BOR", "BXOR", "MAXLOC", "MINLOC"):
        if isinstance(op, MPI.Op) and op == getattr(MPI, name):
            return name
    return "own"


def own_record(recorder: CallRecorder, facts: dict[str, Any], drift: Drift) -> RankRecord:
    """Return this rank's record, with times converted to rank 0's clock."""
    streams = [_as_arrays(stream, drift) for stream in recorder.streams if stream.calls]
    return RankRecord(WORLD.rank, facts, [describe(kind) for kind in recorder.kinds], streams)


def _as_arrays(stream: Stream, drift: Drift) -> CallStream:
    table = stream.table()
    entered, blocked, left = (drift.corrected(table[name]) for name in ("entered", "blocked", "left"))
    return CallStream(stream.members, stream.number, entered, blocked, left, table["spent"], table["kind"])


def gather(comm: MPI.Intracomm, record: RankRecord) -> list[RankRecord]:
    """Return all ranks' records on rank 0, an empty list elsewhere; collective over `comm`, of mpi4py."""
    if comm.rank:
        _send(comm, record)
        return []
    return [record, *(_receive(comm, rank) for rank in range(1, comm.size))]


def _send(comm: MPI.Intracomm, record: RankRecord) -> None:
    streams = [{"members": s.members, "number": s.number, "calls": len(s.kinds)} for s in record.streams]
    header = json.dumps({"facts": record.facts, "kinds": record.kinds, "streams": streams}).encode()
    comm.Send(np.frombuffer(header, np.uint8), 0, _HEADER)
    times = [getattr(stream, name) for stream in record.streams for name in _TIMES]
    comm.Send(np.concatenate([np.empty(0), *times]), 0, _NUMBERS)
    comm.Send(np.concatenate([np.empty(0, np.int64), *(stream.kinds for stream in record.streams)]), 0, _KINDS)


def _receive(comm: MPI.Intracomm, rank: int) -> RankRecord:
    status = MPI.Status()
    comm.Probe(rank, _HEADER, status)
    text = np.empty(status.Get_count(MPI.BYTE), np.uint8)
    comm.Recv(text, rank, _HEADER)
    header = json.loads(text.tobytes())
    calls = [stream["calls"] for stream in header["streams"]]
    times, kinds = np.empty(sum(calls) * len(_TIMES)), np.empty(sum(calls), np.int64)
    comm.Recv(times, rank, _NUMBERS)
    comm.Recv(kinds, rank, _KINDS)
    return RankRecord(rank, header["facts"], header["kinds"], list(_streams(header["streams"], calls, times, kinds)))


def _streams(
    headers: Sequence[dict[str, Any]], calls: Sequence[int], times: np.ndarray, kinds: np.ndarray
) -> list[CallStream]:
    found, start = [], 0
    for header, count in zip(headers, calls, strict=True):
        block = times[start * len(_TIMES) : (start + count) * len(_TIMES)].reshape(len(_TIMES), count)
        members, number = tuple(header["members"]), (header["number"][0], header["number"][1])
        entered, blocked, left, spent = block
        found.append(CallStream(members, number, entered, blocked, left, spent, kinds[start : start + count]))
        start += count
    return found
