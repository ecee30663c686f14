"""File of the ratios that earlier runs have measured, so that later ones start without a measurement.

There is one file for each kind of processor, number of ranks and of cores, and way in which the ranks share caches, in
the folder of :func:`mpicoll.environment.cache_folder`. It holds the measurements of the first `ENOUGH` runs on a quiet
machine, of which the median counts. Later runs measure nothing.
"""

from __future__ import annotations

import contextlib
import json
import platform
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mpicoll.environment import cache_folder, cores, processor, read_file, write_measurement

ENOUGH = 3
"""Number of runs that measure."""
_FORMAT = 2
_MAX_NBYTES = 1 << 16


def median(sharing: Sequence[Sequence[int]], shape: tuple[int, ...]) -> np.ndarray | None:
    """Return the median of what `ENOUGH` runs have measured, float64; None if fewer have.

    Parameters
    ----------
    sharing
        Caches of the ranks, see :func:`mpicoll.shared_memory.cache_sharing.sharing`.
    shape
        Shape of the arrays that were given to :func:`add`; others are ignored.
    """
    kept = _read(_facts(sharing), shape)
    if len(kept) < ENOUGH:
        return None
    return np.sort(kept, axis=0)[ENOUGH // 2]  # np.median imports masked arrays, in 15 ms


def add(sharing: Sequence[Sequence[int]], ratios: np.ndarray) -> None:
    """Keep the measurement of this run, positive numbers; nothing is kept where the file cannot be written."""
    if not _is_usable(ratios):
        return
    facts = _facts(sharing)
    kept = [*_read(facts, ratios.shape), ratios][-ENOUGH:]
    with contextlib.suppress(OSError, RuntimeError):  # RuntimeError: the user has no home
        content = {"format": _FORMAT, "facts": facts, "ratios": [each.tolist() for each in kept]}
        write_measurement(_path(facts), json.dumps(content))


def _facts(sharing: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Return the properties of a run for which measurements are valid."""
    return {
        "processor": processor(),
        "system": platform.release(),
        "cores": cores(),
        "ranks": len(sharing),
        "caches": [list(each) for each in sharing],
    }


def _path(facts: dict[str, Any]) -> Path:
    code = zlib.crc32(json.dumps(facts, sort_keys=True).encode())
    return cache_folder() / f"method-times-{facts['ranks']}-ranks-{code:08x}.json"


def _read(facts: dict[str, Any], shape: tuple[int, ...]) -> list[np.ndarray]:
    """Return the measurements in the file; none from one that is damaged or for other facts."""
    try:
        content = json.loads(read_file(_path(facts), _MAX_NBYTES))
        if content["format"] != _FORMAT or content["facts"] != facts:
            return []
        kept = [np.array(each, np.float64) for each in content["ratios"]]
    except (OSError, RuntimeError, ArithmeticError, LookupError, TypeError, ValueError):  # whatever stands in it
        return []
    return [each for each in kept if each.shape == shape and _is_usable(each)]


def _is_usable(ratios: np.ndarray) -> bool:
    return bool(np.isfinite(ratios).all() and (ratios > 0).all())
