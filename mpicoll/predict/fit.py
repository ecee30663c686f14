"""Fit of a machine to measurements: least squares on relative errors, class by class. Needs no MPI."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mpicoll.collectives import select
from mpicoll.predict.predictor import PredictedCase, predict
from mpicoll.schedules.machine import UNBOUNDED, Correction, Link, MachineDescription, ReduceClass, SizeClass

if TYPE_CHECKING:
    from mpicoll.predict.probe import LinkTimes

BREAKS = (16 << 10, 128 << 10)
"""Message sizes in bytes at which a size class ends, besides the switch to rendezvous."""
_CORRECTION = (0.2, 5.0)
_UNIT, _LEAST = 1e-3, 0.05
_FEWEST = 2
_ITERATIONS, _EXACT = 20, 0.02


class Sample(NamedTuple):
    """Measured time of a collective with an algorithm."""

    case: PredictedCase
    algorithm: str
    seconds: float


def line(lengths: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    """Return a >= 0 (seconds) and b >= 0 (seconds per byte) that minimise the relative errors of a + b nbytes."""
    x, t = np.array(lengths, np.float64), np.array(seconds)
    return nearest(np.array([np.ones_like(x), x]) / t)


def nearest(columns: np.ndarray) -> tuple[float, float]:
    """Return the two non-negative factors for which the sum of two columns is nearest to ones.

    Minimises the sum of absolute errors, by iteratively reweighted least squares, so that a disturbed measurement
    changes little.

    Parameters
    ----------
    columns : (2, count) float64
        One column a row.
    """
    best, error = (0.0, 0.0), float("inf")
    for chosen in ([0, 1], [0], [1]):
        part = columns[chosen].T
        scale = np.maximum(np.abs(part).max(axis=0), 1e-300)
        weight, found = np.ones(len(part)), np.zeros(len(chosen))
        for _ in range(_ITERATIONS):
            found = np.linalg.lstsq(part / scale * weight[:, None], weight, rcond=None)[0] / scale
            weight = np.maximum(np.abs(part @ found - 1), _EXACT) ** -0.5
        left = float(np.abs(part @ found - 1).sum())
        if (found >= 0).all() and left < error:
            full = np.zeros(2)
            full[chosen] = found
            best, error = (float(full[0]), float(full[1])), left
    return best


def link(times: LinkTimes, step: float, senders: int, oversubscribed: bool) -> Link:
    """Fit a link.

    Parameters
    ----------
    times
        Measurements of :meth:`mpicoll.predict.probe.Probe.link`.
    step
        Seconds that starting and testing requests takes in each exchange.
    senders
        Number of ranks of a node that send over this link while all rings exchange.
    oversubscribed
        True if these ranks had to share cores.
    """
    lengths = sorted(times.alone)
    switch = next((n for n in lengths if all(times.waits[m] for m in lengths if m >= n)), UNBOUNDED)
    bounds = _bounds(lengths, switch)
    alone = [_size_class(times, times.alone, step, low, below, switch) for low, below in pairwise((0, *bounds))]
    if not oversubscribed:
        return Link(tuple(alone), _streams(times, senders))
    # What sharing the link itself costs is in the times already.
    together = [_size_class(times, times.together, step, low, below, switch) for low, below in pairwise((0, *bounds))]
    return Link(tuple(alone), float(senders), tuple(together))


def _bounds(lengths: Sequence[int], switch: int) -> list[int]:
    """Return the upper bounds of size classes: each holds at least two lengths, or ends at the switch to rendezvous."""
    found, low = [], 0
    for below in sorted({*BREAKS, switch}):
        inside = sum(low <= n < below for n in lengths)
        after = sum(below <= n for n in lengths)
        if below == switch or (inside >= _FEWEST and after >= _FEWEST):
            found.append(below)
            low = below
    return [*(bound for bound in found if lengths[0] < bound < UNBOUNDED), UNBOUNDED]


def _size_class(
    times: LinkTimes, seconds: Mapping[int, float], step: float, low: int, below: int, switch: int
) -> SizeClass:
    own = [n for n in seconds if low <= n < below]
    whole, per_byte = line(own, [seconds[n] for n in own])
    nearby = min(times.post, key=lambda n: abs(n - own[0]))
    overhead = min(times.post[nearby], whole / 4)
    latency = max(0.0, whole - step - 2 * overhead)
    gap = max(0.0, times.gap[nearby] - per_byte * nearby)
    return SizeClass(below, latency, overhead, min(gap, latency), per_byte, rendezvous=low >= switch)


def _streams(times: LinkTimes, senders: int) -> float:
    """Return the number of concurrent senders that the link serves at full speed, from the two longest messages."""
    longest = sorted(times.alone)[-2:]
    slower = float(np.mean([times.together[n] / times.alone[n] for n in longest]))
    return max(1.0, senders / max(1.0, slower))


def kernel_classes(seconds: Mapping[int, float]) -> tuple[ReduceClass, ...]:
    """Return a class for each measured length; it ends at the geometric mean with the next length."""
    lengths = sorted(seconds)
    bounds = [int((low * high) ** 0.5) for low, high in pairwise(lengths)] + [UNBOUNDED]
    return tuple(ReduceClass(below, seconds[n] / n) for below, n in zip(bounds, lengths, strict=True))


def executor(machine: MachineDescription, samples: Iterable[Sample]) -> tuple[float, float]:
    """Return the executor's seconds for each call and for each step, fitted to short collectives.

    `machine` has 0 for both. Predicted times are linear in both as long as they are on the longest chain.
    """
    columns = []
    for sample in samples:
        base, call, step = (
            predict(one, sample.case, sample.algorithm).seconds
            for one in (machine, replace(machine, call=_UNIT), replace(machine, step=_UNIT))
        )
        # What is left for the executor, at least a little of the time.
        left = max(_LEAST * sample.seconds, sample.seconds - base)
        columns.append([(call - base) / _UNIT / left, (step - base) / _UNIT / left])
    return nearest(np.array(columns).T)


def corrections(machine: MachineDescription, samples: Iterable[Sample]) -> dict[str, Correction]:
    """Return factors for latency and volume, by "collective/algorithm"; none for shared memory, which is tabulated."""
    by_name: dict[str, list[tuple[float, float]]] = {}
    for sample in samples:
        if sample.algorithm == select.SHARED:
            continue
        found = predict(machine, sample.case, sample.algorithm)
        shares = found.latency / sample.seconds, (found.seconds - found.latency) / sample.seconds
        by_name.setdefault(f"{sample.case.collective}/{sample.algorithm}", []).append(shares)
    low, high = _CORRECTION
    factors = {name: np.clip(nearest(np.array(shares).T), low, high) for name, shares in by_name.items()}
    return {name: Correction(float(latency), float(volume)) for name, (latency, volume) in factors.items()}


def errors(machine: MachineDescription, samples: Sequence[Sample]) -> np.ndarray:
    """Return the relative errors, predicted / measured - 1, as a (count,) array."""
    return np.array([predict(machine, s.case, s.algorithm).seconds / s.seconds - 1 for s in samples])
