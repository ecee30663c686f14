"""Codecs of sparse vectors, which plans call by address: entries are selected, encoded, decoded, and taken out.

*Entries* in memory are c indices, uint32 and strictly increasing, at the beginning of room for `capacity` of them, and
behind that room c values, float32. Selectors are encoders (see `codec_kernels`) that write entries and return the bytes
of the indices, 4 c, which stand in the 8 bytes before them. `encode` reads entries with these 8 bytes, and writes what
`sparse_encoding` describes.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ..decorators import helper
from .codec_kernels import Codec, decoder, encoder, settings_of
from .counter_random import word
from .sampling import draw_kept, draw_positions, rate_for_count, rate_for_variance
from .sparse_encoding import checked_length, decode_entries, encode_entries
from .sparse_vectors import clear_entries, select_entries
from .topk import NONE, find_threshold, select_largest

ENTRY_NBYTES = 8
_HEAD_WORDS = 2
_CORRECTIONS = 10
_HALF_OCTAVE = 1 << 22


class Selector(NamedTuple):
    """Kernel and settings of a sparsifier."""

    select: Callable[..., int]
    settings: np.ndarray


@helper
def _indices_and_values(entries):
    """Return the room for indices and for values."""
    nbytes = 4 * (entries.size // ENTRY_NBYTES)
    return entries[:nbytes].view(np.uint32), entries[nbytes : 2 * nbytes].view(np.float32)


@encoder
def largest(x, out, settings, keys, first):
    """Select the largest |x|, as many as there is room for, at most the count."""
    indices, values = _indices_and_values(out)
    select_largest(x, indices.size, indices, values)
    return 4 * indices.size


@helper
def _guess(x, size, k, keys, first):
    """Return the k-th largest |x|, as a pattern, of `size` elements that are drawn."""
    places, sample = np.empty(size, np.uint32), np.empty(size, np.float32)
    draw_positions(x.size, keys, first, places)
    for i in range(size):
        sample[i] = x[places[i]]
    return np.int64(find_threshold(sample, k)[0])


@helper
def _between(low, high, limit):
    """Return the next threshold to try: the middle, but no further than a factor of about 1.4 from the last one."""
    return min(max((low + high) // 2, limit - _HALF_OCTAVE), limit + _HALF_OCTAVE)


@helper
def _above_threshold(x, limit, fewest, indices, values):
    """Select what is not below a threshold, corrected until enough and not too many are; -1 if that fails."""
    # A threshold is tried between `low`, which lets too many through, and `high`, which lets too few.
    low, high = np.int64(0), np.int64(NONE) + 1
    for _ in range(_CORRECTIONS + 1):
        number = select_entries(x, np.uint32(limit - 1), 0, indices, values)
        if fewest <= number <= indices.size:
            return number
        if number > indices.size:
            low = limit
        else:
            high = limit
        limit = _between(low, high, limit)
        if limit <= low:
            break
    return -1


@encoder
def above_sampled(x, out, settings, keys, first):
    """Select what is above a threshold that is estimated from a sample, or the largest |x|.

    Settings: the number of entries wanted; the size of the sample, or 0 for none; the k of the threshold in the sample.
    """
    wanted, size, k = np.int64(settings[0]), np.int64(settings[1]), np.int64(settings[2])
    indices, values = _indices_and_values(out)
    limit = _guess(x, size, k, keys, first) if size > 0 else np.int64(0)
    number = _above_threshold(x, limit, wanted - wanted // 3, indices, values) if limit > 0 else -1
    if number < 0:
        select_largest(x, wanted, indices[:wanted], values[:wanted])
        number = wanted
    return 4 * number


@encoder
def drawn(x, out, settings, keys, first):
    """Select each element with a probability of its own, see `sampling`; all anew while they are too many.

    Settings, as float64: the most entries on average, and the variance, or 0 for none.
    """
    most, variance = settings.view(np.float64)[0], settings.view(np.float64)[1]
    if x.size == 0:
        return 0
    indices, values = _indices_and_values(out)
    rate = rate_for_variance(x, variance, most) if variance > 0 else rate_for_count(x, most)
    number = draw_kept(x, rate, keys, first, indices, values)
    again, attempt = np.empty(2, np.uint32), 0
    while number > indices.size and rate > 0:
        attempt += 1
        again[0], again[1] = word(keys[0], attempt), word(keys[1], attempt)
        number = draw_kept(x, rate, again, first, indices, values)
    return 4 * min(number, indices.size)


@encoder
def not_zero(x, out, settings, keys, first):
    """Select all that are not zero (-0.0 is, NaN is not); there is room for them."""
    indices, values = _indices_and_values(out)
    return 4 * min(select_entries(x, np.uint32(0), 0, indices, values), indices.size)


@decoder
def take_out(payload, out, settings, add):
    """Set the elements of `out` at the indices of own entries to zero."""
    clear_entries(out, payload.view(np.uint32))
    return 0


@helper
def _place_of(indices, first):
    """Return how many indices are below `first`."""
    low, high = 0, indices.size
    while low < high:
        middle = (low + high) // 2
        if np.int64(indices[middle]) < first:
            low = middle + 1
        else:
            high = middle
    return low


@encoder
def encode(x, out, settings, keys, first):
    """Encode the entries of elements from number `first` on; `x` are entries, with the 8 bytes before them, as float32.

    Settings: the number of elements.
    """
    length, words = np.int64(settings[0]), x[_HEAD_WORDS:]
    number, capacity = x[:_HEAD_WORDS].view(np.int64)[0] // 4, words.size // 2
    indices, values = words[:capacity].view(np.uint32)[:number], words[capacity:][:number]
    begin, end = _place_of(indices, first), _place_of(indices, first + length)
    return encode_entries(indices[begin:end], values[begin:end], first, length, out)


@decoder
def decode(payload, out, settings, add):
    """Decode entries; return 1 if the payload cannot be one for so many elements."""
    if payload.size % 4 or payload.size != checked_length(payload, out.size):
        return 1
    decode_entries(payload, out, add)
    return 0


def payloads_of(length: int) -> Codec:
    """Return the codec of entries of `length` elements."""
    return Codec(encode, decode, settings_of(length))
