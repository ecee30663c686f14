"""Crossover of compression, the message size above which it pays: ``mpicoll predict --compression int8 --size 4 64``.

Links are those of the machine description, fitted or textbook; the compressor's speed is measured here. The comparison
is between ``Allreduce`` with default arguments and with ``compression=``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from mpicoll.collectives import select
from mpicoll.compression import Aggregatable, Compressor, Sparsifier, compressor
from mpicoll.predict.predictor import PredictedCase, names, per_node, predict
from mpicoll.schedules.machine import IDENTITY, MachineDescription, Wire

SHORTEST, LONGEST, STEPS = 1 << 10, 128 << 20, 2
"""Smallest and largest message size in bytes that are tried, and the number of sizes to a factor of two."""
MARGIN = 1.1
"""Gain from which compression pays."""


class Crossover(NamedTuple):
    """Smallest message size in bytes from which compression always pays, None if there is none; gain at the largest."""

    nbytes: int | None
    gain: float


def crossover(machine: MachineDescription, nodes: tuple[int, ...], wire: Wire) -> Crossover:
    """Return the crossover of an allreduce on `nodes` (each rank's node): where `gain_at` stays above `MARGIN`."""
    lengths = [round(SHORTEST * 2 ** (step / STEPS)) for step in range(STEPS * 17 + 1)]
    found, gain = None, 1.0
    for nbytes in lengths:
        gain = gain_at(machine, PredictedCase("allreduce", nodes, nbytes), wire)
        found = (found or nbytes) if gain > MARGIN else None
    return Crossover(found, gain)


def gain_at(machine: MachineDescription, case: PredictedCase, wire: Wire) -> float:
    """Return the predicted time of a plain allreduce over that of a compressed one."""
    # Both by the model alone: a correction was only fitted for one of them.
    machine = replace(machine, corrections={})
    plain, packed = (predict(machine, case, algorithm(machine, case, each), wire=each, split=False)
                     for each in (IDENTITY, wire))  # fmt: skip
    return plain.seconds / packed.seconds


def algorithm(machine: MachineDescription, case: PredictedCase, wire: Wire = IDENTITY) -> str:
    """Return the algorithm that ``"auto"`` selects, among those whose time can be predicted.

    Parameters
    ----------
    wire
        Compressor of an allreduce whose time :func:`two_shot_codec` allows to predict; IDENTITY for none.
    """
    if wire != IDENTITY:
        return select.HIERARCHY if select.HIERARCHY in names(machine, case) else select.TWO_SHOT
    there = names(machine, case)
    for name in (select.SHARED, select.HIERARCHY):
        if name in there:
            return name
    means = select.Capabilities(case.size, apart=per_node(case) == 1)
    return select.choose(case.collective, case.nbytes, means)


def two_shot_codec(spec: str) -> Compressor:
    """Return the compressor of a specification.

    Raises
    ------
    ValueError, UnknownCompressor
        If there is none, or it does not use the two-shot allreduce.
    """
    try:
        codec = compressor(spec)
    except ValueError as error:
        raise ValueError(f"--{error}") from None
    if isinstance(codec, Sparsifier) or (isinstance(codec, Aggregatable) and not codec.in_two_shots):
        raise ValueError(
            f"--compression: {spec} does not use the two-shot allreduce, the only one modelled; "
            "measure it with python -m mpicoll tune --compression"
        )
    return codec


def describe(spec: str, wire: Wire, found: Sequence[Crossover]) -> list[str]:
    """Return the cells of a row: compressor, compressed over original size, speeds, and a cell for each crossover."""
    speeds = [f"{1e-9 / seconds:.1f} GB/s" for seconds in (wire.encode, wire.decode)]
    cells = ["never" if one.nbytes is None else f"{_short(one.nbytes)}, {one.gain:.1f}x" for one in found]
    return [spec, f"{wire.ratio:.3f}", *speeds, *cells]


def _short(nbytes: int) -> str:
    for unit, factor in (("MB", 1 << 20), ("KB", 1 << 10)):
        if nbytes >= factor:
            return f"{nbytes / factor:.3g} {unit}"
    return f"{nbytes} B"
