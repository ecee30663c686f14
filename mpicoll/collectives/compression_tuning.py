"""Compression tuning: the lengths from which compressing pays, for ``compression="auto"`` and ``"auto:int4"``.

The first blocking or persistent call with a length is made several times with compression and without, in turn, from
the caller's vector into working memory. The medians of the slowest rank's times, which all ranks know, decide. The
measurement takes about as long as eight to sixteen calls, once. Compression is used if it is more than 10 % faster. A
positive result also holds for longer vectors, which gain more, and a negative one for shorter vectors. So for each
compressor two lengths are known: below the first it does not pay, from the second on it does.
``python -m mpicoll tune --compression int8`` measures them beforehand. Decisions are never revised.

Nothing is measured, and nothing compressed, where all ranks are on one node, where another algorithm is asked for, for
short vectors, and for what compressors do not know (other types and operations). Nonblocking calls do not wait for
other ranks, and so do not measure: they do not compress until a blocking or persistent call, or the table, has decided.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from mpi4py import MPI

from mpicoll.buffers import reduction_ops
from mpicoll.buffers.flat_buffer import Buffer, view_at
from mpicoll.collectives import select
from mpicoll.compression import compressor

if TYPE_CHECKING:
    from mpicoll.collectives.call_context import AnyTask, CallArguments, CallContext
    from mpicoll.communicator.channel import Channel

CANDIDATE = "int8"
"""The compressor of ``"auto"`` without a specification."""
SHORTEST = 16 << 10
"""In bytes. Shorter vectors are not measured: the latency of a message costs more than its bytes."""
MARGIN = 1.1
"""The factor by which compressing has to be faster."""
_LONGER, _SHORTER = 1.5, 0.9
"""How far a verdict carries to the side where it is less certain: time grows with the length, at most in proportion."""
_FEW, _MANY = 3, 7
_CLEAR = (0.7, 1.6)
_ENOUGH_SECONDS = 1.0

Prepare = Callable[["CallContext", "CallArguments"], "AnyTask"]


class PayingRange(NamedTuple):
    """Known limits: vectors shorter than `dense_below` bytes lose, those of `packed_from` bytes and more gain."""

    dense_below: float = SHORTEST
    packed_from: float = math.inf

    def pays(self, nbytes: int) -> bool | None:
        """Return whether compressing vectors of `nbytes` bytes pays, None if that is not known."""
        if nbytes < self.dense_below:
            return False
        return True if nbytes >= self.packed_from else None

    def with_verdict(self, nbytes: int, pays: bool) -> PayingRange:
        """Return the range after a measurement of a length between the two limits."""
        if pays:
            return self._replace(packed_from=max(self.dense_below, _SHORTER * nbytes))
        return self._replace(dense_below=min(self.packed_from, _LONGER * nbytes))


def candidate(compression: Any) -> str | None:
    """Return the compressor specification of ``"auto"`` or ``"auto:SPEC"``, None if `compression` is something else.

    Raises
    ------
    UnknownCompressor, ValueError
        If the candidate is no compressor.
    """
    return _candidate(compression) if isinstance(compression, str) else None


@lru_cache(maxsize=64)
def _candidate(text: str) -> str | None:
    word, _, spec = text.strip().partition(":")
    if word != select.AUTO:
        return None
    spec = spec.strip() or CANDIDATE
    compressor(spec)
    return spec


def resolve(scope: CallContext, call: CallArguments, given: Buffer, prepare: Prepare) -> Any:
    """Return the call's compression, with ``"auto"`` replaced by a specification or None; equal on all ranks.

    Parameters
    ----------
    given
        The caller's vector.
    prepare
        Makes a task of a call.
    """
    spec = candidate(call.compression)
    if spec is None:
        return call.compression
    channel = scope.channel
    if not _between_nodes(channel):
        channel.uncompressed.add(call.compression)
        return None
    possible = given.dtype == np.float32 and reduction_ops.name_of(call.op) == "SUM"
    if not possible or call.algorithm not in (None, select.AUTO):
        return None
    pays = known(scope, spec, given.nbytes)
    if pays is None and scope.may_wait:
        x = view_at(given.address, given.count, given.dtype)
        pays = _gain(scope, call._replace(sendbuf=x, recvbuf=np.empty_like(x)), spec, prepare) > MARGIN
        key = _key(scope, spec)
        channel.paying_ranges[key] = channel.paying_ranges.get(key, PayingRange()).with_verdict(given.nbytes, pays)
    return spec if pays else None


def known(scope: CallContext, spec: str, nbytes: int) -> bool | None:
    """Return whether a compressor pays, None if that is not known yet; local."""
    if not _between_nodes(scope.channel):
        return False
    return scope.channel.paying_ranges.get(_key(scope, spec), PayingRange()).pays(nbytes)


def remember(channel: Channel, spans: dict[str, PayingRange]) -> None:
    """Take over the ranges of a tuning table, for blocking calls with default arguments."""
    for spec, span in spans.items():
        channel.paying_ranges[spec, select.AUTO, channel.cluster is not None] = span


def remembered(channel: Channel) -> dict[str, PayingRange]:
    """Return the known ranges of blocking calls with default arguments."""
    wanted = select.AUTO, channel.cluster is not None
    return {key[0]: span for key, span in channel.paying_ranges.items() if key[1:] == wanted}


def _key(scope: CallContext, spec: str) -> tuple[str, str, bool]:
    return spec, scope.algorithm, scope.means.hierarchy


def _between_nodes(channel: Channel) -> bool:
    return channel.apart or channel.cluster is not None


def _gain(scope: CallContext, call: CallArguments, spec: str, prepare: Prepare) -> float:
    """Measure how much faster it is to compress; the same number on all ranks."""
    counters = [channel for channel in (scope.channel, _lane(scope.channel)) if channel is not None]
    before = [channel.compressed for channel in counters]
    ways = [call._replace(compression=None), call._replace(compression=spec)]
    rounds: list[np.ndarray] = []
    for way in ways:
        _seconds(scope, way, prepare)  # compiles, connects, makes plans
    while len(rounds) < _MANY:
        rounds.append(_slowest(scope, call, [_seconds(scope, way, prepare) for way in ways], prepare))
        dense, packed = np.median(rounds, axis=0)
        gain = float(dense / packed)
        clear = not _CLEAR[0] < gain < _CLEAR[1]
        if clear and (len(rounds) >= _FEW or np.sum(rounds) > _ENOUGH_SECONDS):
            break
    for channel, number in zip(counters, before, strict=True):
        channel.compressed = number  # random choices are those of a run without measurements
    return gain


def _lane(channel: Channel) -> Channel | None:
    return channel.cluster.lane if channel.cluster is not None else None


def _seconds(scope: CallContext, call: CallArguments, prepare: Prepare) -> float:
    """Make a call and return its time on this rank."""
    begin = time.perf_counter()
    prepare(scope, call).run(scope.timeout)
    return max(1e-9, time.perf_counter() - begin)


def _slowest(scope: CallContext, call: CallArguments, seconds: list[float], prepare: Prepare) -> np.ndarray:
    """Return the largest over all ranks, on all of them; it also brings them together for the next round."""
    times, largest = np.array(seconds), np.empty(len(seconds))
    messages = scope.by_messages()
    made = call._replace(sendbuf=times, recvbuf=largest, op=MPI.MAX, algorithm="recursive_doubling", compression=None)
    prepare(messages, made).run(scope.timeout)
    return largest
