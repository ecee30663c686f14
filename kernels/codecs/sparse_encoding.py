"""Sparse vectors on the wire: six bytes an entry, or the whole vector where that is shorter.

A payload for a stretch of ``length`` elements is, in words of 4 bytes::

    number of entries c | entries in each 65536 elements | c offsets of 2 bytes, filled up | c values, float32
    DENSE               | all elements, float32

Entries stand in the order of their places, which are strictly increasing; an offset counts from the beginning of its
65536 elements. Every payload is as short as it can be, so that a sum that fills up becomes dense by itself. (Switching
to dense: Renggli et al., "SparCML", SC19, section 5.1.)
"""

import numpy as np

from ..decorators import helper, kernel

DENSE = 0xFFFFFFFF
"""What stands in place of the number of entries."""
_BLOCK_BITS = 16
_OFFSET_MASK = 0xFFFF


def wire_nbytes(entries: int, length: int) -> int:
    """Return the length of the payload for so many entries out of `length` elements."""
    blocks = (length + _OFFSET_MASK) >> _BLOCK_BITS
    return min(4 + 4 * blocks + 2 * (entries + entries % 2) + 4 * entries, 4 + 4 * length)


@helper
def encode_entries(indices, values, first, length, out):
    """Write the payload of sorted entries for elements ``first`` to ``first + length - 1``; return its length in bytes.

    Parameters
    ----------
    indices : (c,) uint32
        Places in the whole vector, strictly increasing, all within the stretch.
    values : (c,) float32
    out : uint8
        Aligned to 4 bytes, of at least `wire_nbytes` bytes.
    """
    count = indices.size
    blocks = (length + _OFFSET_MASK) >> _BLOCK_BITS
    body = 4 * (1 + blocks)
    floats = body + 2 * (count + count % 2)
    words, numbers = out.view(np.uint32), out.view(np.float32)
    if floats + 4 * count >= 4 + 4 * length:
        words[0] = np.uint32(DENSE)
        dense = numbers[1 : 1 + length]
        dense[:] = np.float32(0)
        for j in range(count):
            dense[np.int64(indices[j]) - first] = values[j]
        return 4 + 4 * length
    words[: 1 + blocks] = np.uint32(0)
    words[0] = np.uint32(count)
    halves = out[body:floats].view(np.uint16)
    counts = words[1 : 1 + blocks]
    for j in range(count):
        place = np.int64(indices[j]) - first
        counts[place >> _BLOCK_BITS] += np.uint32(1)
        halves[j] = np.uint16(place & _OFFSET_MASK)
    if count % 2:
        halves[count] = np.uint16(0)
    numbers[floats // 4 : floats // 4 + count] = values
    return floats + 4 * count


@kernel
def encode(indices, values, first, length, out):
    """See `encode_entries`."""
    return encode_entries(indices, values, first, length, out)


@helper
def checked_length(payload, length):
    """Return how many bytes the payload at the beginning of `payload` has, or -1 if it cannot be one.

    `payload` is uint8, aligned to 4 bytes, and may go on beyond the end; what `decode_entries` relies on is checked.
    """
    if payload.size < 4:
        return -1
    words = payload.view(np.uint32)
    if words[0] == np.uint32(DENSE):
        return 4 + 4 * length if payload.size >= 4 + 4 * length else -1
    count = np.int64(words[0])
    blocks = (length + _OFFSET_MASK) >> _BLOCK_BITS
    body = 4 * (1 + blocks)
    floats = body + 2 * (count + count % 2)
    if count > length or floats + 4 * count > payload.size:
        return -1
    halves = payload[body:floats].view(np.uint16)
    at = np.int64(0)
    for block in range(blocks):
        end = at + np.int64(words[1 + block])
        if end > count:
            return -1
        room = min(length - (block << _BLOCK_BITS), _OFFSET_MASK + 1)
        part = halves[at:end]
        wrong = False
        for j in range(1, part.size):
            wrong |= part[j] <= part[j - 1]
        if wrong or (part.size and part[part.size - 1] >= room):
            return -1
        at = end
    return floats + 4 * count if at == count else -1


@kernel
def length_of(payload, length):
    """See `checked_length`."""
    return checked_length(payload, length)


@helper
def decode_entries(payload, out, add):
    """Write what a payload that `checked_length` accepts says to float32 `out` of shape (length,), or add it there.

    Return the number of entries; of a dense one that of all elements.
    """
    words, numbers = payload.view(np.uint32), payload.view(np.float32)
    length = out.size
    if words[0] == np.uint32(DENSE):
        dense = numbers[1 : 1 + length]
        if add:
            for i in range(length):
                out[i] += dense[i]
        else:
            out[:] = dense
        return length
    if not add:
        out[:] = np.float32(0)
    count = np.int64(words[0])
    blocks = (length + _OFFSET_MASK) >> _BLOCK_BITS
    body = 4 * (1 + blocks)
    floats = body + 2 * (count + count % 2)
    halves = payload[body:floats].view(np.uint16)
    values = numbers[floats // 4 : floats // 4 + count]
    at = np.int64(0)
    for block in range(blocks):
        target = out[block << _BLOCK_BITS :]
        end = at + np.int64(words[1 + block])
        for j in range(at, end):
            target[halves[j]] += values[j]
        at = end
    return count


@kernel
def decode(payload, out, add):
    """See `decode_entries`."""
    return decode_entries(payload, out, add)


@kernel
def clear_common(indices, sums, out):
    """Set the elements of `out` at these places to zero where `sums` is not zero."""
    for j in range(indices.size):
        if sums[indices[j]] != 0:
            out[indices[j]] = np.float32(0)
