"""Assignment of writes to ranks: pieces of vectors, parts of replicated arrays, and arrays of one rank alone."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from mpicoll.checkpoint.tensor_file import dtype_name
from mpicoll.data.sampler import part

_NAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.:-]{0,198}[A-Za-z0-9_])?")
_SHARE_BYTES = 1 << 16
"""Smallest part, in bytes, into which a replicated array is divided among ranks."""


@dataclass(frozen=True)
class Piece:
    """Elements ``start`` to ``start + array.size - 1`` of a vector of `total` elements; `array` has one dimension."""

    array: np.ndarray
    start: int
    total: int


@dataclass(frozen=True)
class Whole:
    """An array of any shape that every rank holds with the same bits; each rank writes a part of it."""

    array: np.ndarray


@dataclass(frozen=True)
class PerRank:
    """An array of any shape that belongs to this rank, such as a residual; other ranks have others, or none."""

    array: np.ndarray


Tensors: TypeAlias = Mapping[str, Piece | Whole | PerRank | Sequence[Piece]]
"""Tensors that a rank saves or restores, by name. Several pieces of one vector form a list, which may be empty."""


class TensorLayout(NamedTuple):
    """Layout of a tensor on a rank; `ranges` are starts and stops, in elements, of the parts that the rank writes."""

    kind: str
    dtype: str
    shape: tuple[int, ...]
    ranges: list[tuple[int, int]]


def piece_key(name: str, start: int) -> str:
    """Return the key, in a rank's file, of the piece of a vector that begins at `start`; not a valid tensor name."""
    return f"{name}@{start}"


def is_name(name: object) -> bool:
    """Return True for a valid name of a tensor: letters and digits, with ``_ . : -`` inside, but no ``..``."""
    return isinstance(name, str) and _NAME.fullmatch(name) is not None and ".." not in name


def layouts(tensors: Tensors, size: int, rank: int) -> dict[str, TensorLayout]:
    """Return the layout of each tensor on `rank` of `size`.

    Raises
    ------
    ValueError, TypeError
        If a name, dtype, shape or range cannot be saved; the message names the tensor.
    """
    return {name: layout for name, layout, _ in _walk(tensors, size, rank)}


def arrays_to_write(tensors: Tensors, size: int, rank: int) -> dict[str, np.ndarray]:
    """Return the arrays of the file of `rank`, by key; views where possible."""
    found: dict[str, np.ndarray] = {}
    for name, layout, arrays in _walk(tensors, size, rank):
        if layout.kind == "per_rank":
            found[name] = arrays[0]
        else:
            found |= {piece_key(name, r[0]): array for r, array in zip(layout.ranges, arrays, strict=True)}
    return found


def pieces_of(entry: Piece | Sequence[Piece]) -> Sequence[Piece]:
    """Return the pieces of an entry, which may be a single one."""
    return [entry] if isinstance(entry, Piece) else entry


def _walk(tensors: Tensors, size: int, rank: int) -> Iterator[tuple[str, TensorLayout, list[np.ndarray]]]:
    turn = 0
    for name in sorted(tensors):
        if not is_name(name):
            raise ValueError(f"tensor name {name!r:.80}: not up to 200 letters and digits, with _ . : - inside")
        entry = tensors[name]
        if isinstance(entry, PerRank):
            array = _checked(name, entry.array)
            yield name, TensorLayout("per_rank", dtype_name(array.dtype), array.shape, []), [array]
        elif isinstance(entry, Whole):
            array = _checked(name, entry.array)
            start, stop, turn = _share(array, size, rank, turn)
            ranges = [(start, stop)] if stop > start else []
            parts = [array.reshape(-1)[first:last] for first, last in ranges]
            yield name, TensorLayout("whole", dtype_name(array.dtype), array.shape, ranges), parts
        else:
            yield from _walk_pieces(name, pieces_of(entry))


def _walk_pieces(name: str, pieces: Sequence[Piece]) -> Iterator[tuple[str, TensorLayout, list[np.ndarray]]]:
    if not isinstance(pieces, (list, tuple)) or not all(isinstance(piece, Piece) for piece in pieces):
        raise TypeError(f"tensor {name}: neither Piece, Whole, PerRank nor a list of Piece")
    if not pieces:
        return
    arrays = [_checked(name, piece.array) for piece in pieces]
    dtype, total = arrays[0].dtype, pieces[0].total
    for piece, array in zip(pieces, arrays, strict=True):
        if array.ndim != 1 or array.dtype != dtype or piece.total != total:
            raise ValueError(f"tensor {name}: pieces are vectors of one dtype and one total")
        if not 0 <= piece.start <= piece.start + array.size <= total:
            raise ValueError(f"tensor {name}: {array.size} elements from {piece.start} do not fit into {total}")
    filled = [(piece.start, array) for piece, array in zip(pieces, arrays, strict=True) if array.size]
    ranges = [(int(start), int(start) + array.size) for start, array in filled]
    yield name, TensorLayout("pieces", dtype_name(dtype), (int(total),), ranges), [array for _, array in filled]


def _checked(name: str, array: np.ndarray) -> np.ndarray:
    if not isinstance(array, np.ndarray):
        raise TypeError(f"tensor {name}: needs a NumPy array, not {type(array).__name__}")
    native = array.astype(array.dtype.newbyteorder("="), copy=False)
    try:
        dtype_name(native.dtype)
    except TypeError as error:
        raise TypeError(f"tensor {name}: {error}") from None
    return np.ascontiguousarray(native).reshape(array.shape)


def _share(array: np.ndarray, size: int, rank: int, turn: int) -> tuple[int, int, int]:
    """Return start and stop of a rank's part of a replicated array, and the first writer of the next array."""
    writers = min(size, max(1, array.nbytes // _SHARE_BYTES))
    number = (rank - turn) % size
    start, stop = part(array.size, writers, number) if number < writers else (0, 0)
    return start, stop, (turn + writers) % size


def merge(told: Sequence[Mapping[str, TensorLayout]]) -> dict[str, dict[str, Any]]:
    """Merge the layouts of all ranks, in rank order, into the manifest's table of tensors.

    Raises
    ------
    ValueError
        If ranks disagree about a tensor, or the pieces of a vector leave gaps or overlap; the message names the tensor
        and the ranks.
    """
    return {name: _merge_one(name, told) for name in sorted(set().union(*told))}


def _merge_one(name: str, told: Sequence[Mapping[str, TensorLayout]]) -> dict[str, Any]:
    said = {rank: layouts[name] for rank, layouts in enumerate(told) if name in layouts}
    first, model = next(iter(said.items()))
    for rank, layout in said.items():
        shape_matters = model.kind != "per_rank"
        if layout[:2] != model[:2] or (shape_matters and layout.shape != model.shape):
            raise ValueError(f"tensor {name}: rank {rank} has {describe(layout)}, rank {first} {describe(model)}")
    if model.kind == "per_rank":
        return {"kind": "per_rank", "dtype": model.dtype,
                "shapes": [[rank, list(layout.shape)] for rank, layout in said.items()]}  # fmt: skip
    if model.kind == "whole" and len(said) < len(told):
        raise ValueError(f"tensor {name}: rank {min(set(range(len(told))) - set(said))} has none, though others do")
    pieces = sorted((start, stop, rank) for rank, layout in said.items() for start, stop in layout.ranges)
    check_tiling(name, pieces, math.prod(model.shape))
    return {"kind": "vector", "dtype": model.dtype, "shape": list(model.shape), "pieces": [list(p) for p in pieces]}


def describe(layout: TensorLayout) -> str:
    """Return kind and dtype for a message, with the shape where it must be equal on all ranks."""
    return f"{layout.kind} {layout.dtype}" + (f" {tuple(layout.shape)}" if layout.kind != "per_rank" else "")


def check_tiling(name: str, pieces: Sequence[Sequence[int]], total: int) -> None:
    """Check that pieces ``(start, stop, rank)``, in order, cover ``0 .. total`` once.

    Raises
    ------
    ValueError
        If they do not; the message names the tensor, and the rank of the piece.
    """
    at = 0
    for start, stop, rank in pieces:
        if start != at or stop <= start:
            what = "leave a gap before" if start > at else "overlap"
            raise ValueError(f"tensor {name}: its pieces {what} elements {start} to {stop} of rank {rank}")
        at = stop
    if at != total:
        raise ValueError(f"tensor {name}: its pieces end at element {at} of {total}")
