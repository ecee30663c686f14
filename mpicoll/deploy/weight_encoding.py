"""Stored form of weights: whole arrays, or a bit for each weight and the weights that are not 0; int4 codes in pairs.

An encoding is chosen by its size. Arrays from files are checked before they are decoded.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

WHOLE, BITMASK = "whole", "bitmask"
ENCODINGS = (WHOLE, BITMASK)
STORED_TYPES = {32: "float32", 8: "int8", 4: "uint8"}
"""Element type in files by the number of bits of a weight; two codes of 4 bits share a byte."""


def packed_count(count: int, bits: int) -> int:
    """Return the number of stored elements of `count` weights."""
    return -(-count // 2) if bits == 4 else count


def pack(values: np.ndarray, bits: int) -> np.ndarray:
    """Return a vector of weights as it is stored; codes of 4 bits in pairs, the first in the lower half of a byte."""
    if bits != 4:
        return np.ascontiguousarray(values)
    codes = np.zeros(2 * packed_count(values.size, 4), np.uint8)
    codes[: values.size] = values.view(np.uint8) & 15
    return codes[0::2] | codes[1::2] << 4


def unpack(stored: np.ndarray, count: int, bits: int) -> np.ndarray:
    """Return `count` weights of a stored vector, float32 or int8."""
    if bits != 4:
        return stored
    codes = np.stack([stored & 15, stored >> 4], axis=1).reshape(-1)[:count].astype(np.int8)
    return np.where(codes > 7, codes - 16, codes).astype(np.int8)


def smallest(count: int, nonzero: int, bits: int) -> tuple[str, int]:
    """Return the smallest encoding of `count` weights, of which `nonzero` are not 0, and its bytes."""
    itemsize = np.dtype(STORED_TYPES[bits]).itemsize
    whole = packed_count(count, bits) * itemsize
    masked = -(-count // 8) + packed_count(nonzero, bits) * itemsize
    return (BITMASK, masked) if masked < whole else (WHOLE, whole)


def encode(weight: np.ndarray, bits: int) -> tuple[str, dict[str, np.ndarray]]:
    """Return the smallest encoding of weights, and its arrays by name.

    Parameters
    ----------
    weight : (inputs, outputs) of float32 or int8
    bits
        Bits of a weight: 32, 8 or 4.
    """
    flat = weight.reshape(-1)
    present = flat != 0
    encoding, _ = smallest(flat.size, int(np.count_nonzero(present)), bits)
    if encoding == WHOLE:
        return WHOLE, {"weight": pack(flat, bits)}
    return BITMASK, {"mask": np.packbits(present), "values": pack(flat[present], bits)}


class Stored(Protocol):
    """Arrays of an encoding, by name, of which ranges can be read."""

    def size(self, name: str) -> int:
        """Return the number of elements of an array."""

    def read(self, name: str, start: int, stop: int) -> np.ndarray:
        """Return elements ``start`` to ``stop - 1`` of an array."""


def decode(encoding: str, stored: Stored, count: int, bits: int, start: int, stop: int) -> np.ndarray:
    """Return weights ``start`` to ``stop - 1`` of `count` ones, (stop - start,) of float32 or int8.

    Of arrays with weights only the range is read, and of a bitmask everything: a bit for each weight.

    Raises
    ------
    ValueError
        If the arrays do not fit each other.
    """
    if encoding == WHOLE:
        if stored.size("weight") != packed_count(count, bits):
            raise ValueError(f"weight: {stored.size('weight')} elements for {count} weights of {bits} bits")
        return _elements(stored, "weight", start, stop, bits)
    present = np.unpackbits(stored.read("mask", 0, -(-count // 8)), count=count).view(bool)
    kept, before = int(np.count_nonzero(present)), int(np.count_nonzero(present[:start]))
    if stored.size("values") != packed_count(kept, bits):
        raise ValueError(f"values: {stored.size('values')} elements for {kept} weights of {bits} bits in the mask")
    wanted = present[start:stop]
    weights = np.zeros(stop - start, np.float32 if bits == 32 else np.int8)
    weights[wanted] = _elements(stored, "values", before, before + int(np.count_nonzero(wanted)), bits)
    return weights


def _elements(stored: Stored, name: str, start: int, stop: int, bits: int) -> np.ndarray:
    """Return weights ``start`` to ``stop - 1`` of a stored vector, float32 or int8."""
    if bits != 4:
        return stored.read(name, start, stop)
    first = start // 2
    return unpack(stored.read(name, first, packed_count(stop, 4)), stop - 2 * first, 4)[start - 2 * first :]
