"""Speed and payload size of compressors, measured once on one core and kept beside the tuning tables."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable

import numpy as np

from mpicoll import __version__
from mpicoll.compression.base import Compressor, Key
from mpicoll.environment import cache_folder, processor, write_measurement
from mpicoll.schedules.machine import Wire

NBYTES = 1 << 20
"""Bytes to measure with: more than the private cache of most cores, less than the shared cache."""
_TRIALS, _SECONDS = 5, 0.1
_FORMAT = "mpicoll compressors"


def measure(codec: Compressor, nbytes: int = NBYTES) -> Wire:
    """Return payload bytes per byte of float32, and the seconds per byte of float32 of encoding and of decoding.

    The data are normally distributed; the shortest of several trials counts. The first call compiles.
    """
    x = np.random.default_rng(1).standard_normal(max(1, nbytes // 4), np.float32)
    out, payload = np.empty_like(x), np.empty(codec.wire_nbytes(x.size), np.uint8)
    length = codec.compress(x, payload, Key())
    encode = _least(lambda: codec.compress(x, payload, Key()))
    decode = _least(lambda: codec.decompress_add(payload[:length], out))
    return Wire(length / x.nbytes, encode / x.nbytes, decode / x.nbytes)


def _least(call: Callable[[], object]) -> float:
    call()
    best, trials, begin = math.inf, 0, time.perf_counter()
    while trials < _TRIALS or time.perf_counter() - begin < _SECONDS:
        start = time.perf_counter()
        call()
        best, trials = min(best, time.perf_counter() - start), trials + 1
    return best


def known(codec: Compressor) -> Wire:
    """Return the measurement of a compressor on this machine; it is made at the first call."""
    path, name = cache_folder() / "compressors.json", repr(codec)
    facts = {"format": _FORMAT, "version": __version__, "processor": processor()}
    kept: dict[str, list[float]] = {}
    try:
        content = json.loads(path.read_text())
        if {key: content[key] for key in facts} == facts:
            kept = dict(content["speeds"])
        wire = Wire(*kept[name])
        if all(isinstance(value, float) and 0 < value < math.inf for value in (wire.ratio, wire.encode, wire.decode)):
            return wire
    except (OSError, ValueError, KeyError, TypeError):
        pass  # nothing there, of another version, or damaged: it is measured again
    wire = measure(codec)
    kept[name] = [wire.ratio, wire.encode, wire.decode]
    with contextlib.suppress(OSError):  # a folder that cannot be written costs a measurement each time
        write_measurement(path, json.dumps({**facts, "speeds": kept}, indent=1) + "\n")
    return wire
