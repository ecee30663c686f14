"""Bit masks of 64 numbers at a time that say which are large, so that rare ones can be picked out quickly.

Numba has no name for this. The loop that it would take (compare, shift, or) is not recognised by LLVM, and a loop that
looks at every element costs several times what reading them does.
"""

import numpy as np

from ..decorators import helper

ABSOLUTE = 0x7FFFFFFF
"""All bits of a float32 but its sign."""
LANES = 64


def mask_at_least(patterns: np.ndarray, first: int, threshold: np.uint32) -> np.uint64:
    """Return a word whose bit j says whether ``patterns[first + j]`` without its sign is at least `threshold`.

    `patterns` is a contiguous uint32 array with at least 64 elements from `first` on.
    """
    lanes = (patterns[first : first + LANES] & np.uint32(ABSOLUTE)) >= threshold
    return np.packbits(lanes, bitorder="little").view(np.uint64)[0]


@helper
def mask_of(patterns, first, threshold):
    """Return the same where fewer than 64 may be left: the bits of the others are 0."""
    if first + LANES <= patterns.size:
        return mask_at_least(patterns, first, threshold)
    mask = np.uint64(0)
    for i in range(first, patterns.size):
        if np.uint32(patterns[i] & np.uint32(ABSOLUTE)) >= threshold:
            mask |= np.uint64(1) << np.uint64(i - first)
    return mask


def lowest(mask: np.uint64) -> int:
    """Return the number of the lowest bit that is set in a word, or 64."""
    return (int(mask) & -int(mask)).bit_length() - 1 if mask else LANES


def ones(mask: np.uint64) -> int:
    """Return how many bits of a word are set."""
    return int(mask).bit_count()


@helper
def enter(mask, first, number, indices):
    """Write ``first + j`` for every bit j that is set to ``indices[number:]``, as far as there is room.

    Return how many there are then, room or not.
    """
    place, number = number, number + ones(mask)
    if place + LANES <= indices.size:
        # The first few without asking whether there are so many: a branch that is foreseen wrongly would cost more.
        for _ in range(4):
            indices[place] = np.uint32(first + lowest(mask))
            mask &= mask - np.uint64(1)
            place += 1
    while mask and place < indices.size:
        indices[place] = np.uint32(first + lowest(mask))
        mask &= mask - np.uint64(1)
        place += 1
    return number
