"""Stored form of weights: whole arrays, or a bit for each weight and the weights that are not 0; int4 codes in pairs.

An encoding is chosen by its size. Arrays from files are checked before they are decoded.
"""

from __future__ import annotations

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
    whole, values = pack(flat, bits), pack(flat[present], bits)
    mask = np.packbits(present)
    if mask.nbytes + values.nbytes < whole.nbytes:
        return BITMASK, {"mask": mask, "values": values}
    return WHOLE, {"weight": whole}


def decode(encoding: str, arrays: dict[str, np.ndarray], shape: tuple[int, int], bits: int) -> np.ndarray:
    """Return the weights, (inputs, outputs) of float32 or int8.

    Raises
    ------
    ValueError
        If the arrays do not fit each other.
    """
    count = shape[0] * shape[1]
    if encoding == WHOLE:
        stored = arrays["weight"]
        if stored.size != packed_count(count, bits):
            raise ValueError(f"weight: {stored.size} elements for {count} weights of {bits} bits")
        return unpack(stored, count, bits).reshape(shape)
    present = np.unpackbits(arrays["mask"], count=count).astype(bool)
    kept, values = int(present.sum()), arrays["values"]
    if values.size != packed_count(kept, bits):
        raise ValueError(f"values: {values.size} elements for {kept} weights of {bits} bits in the mask")
    weight = np.zeros(count, np.float32 if bits == 32 else np.int8)
    weight[present] = unpack(values, kept, bits)
    return weight.reshape(shape)
