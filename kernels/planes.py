"""Codes of 1 to 8 bits, packed so that vector units can do it: a block of codes becomes planes.

A plane holds the next 8, 4, 2 or 1 bits of every code of the block, from the lowest up. Byte j of a plane of w bits
holds those of codes j, j + n w / 8, j + 2 n w / 8, ... (n codes in the block), so that bytes are made from runs of
codes and no bits cross lanes. Five bits are a plane of four and one of one. The block's length is a multiple of 32.
"""

import numpy as np

from .jit import helper

UNIT = 32
"""Block lengths are multiples of it."""


@helper
def _put(part, shift, mask, out, place):
    """Enter bits of codes into a plane, or begin it at place 0."""
    if place == 0:
        for j in range(out.size):
            out[j] = np.uint8(part[j] >> shift) & mask
    else:
        for j in range(out.size):
            out[j] |= ((part[j] >> shift) & mask) << place


@helper
def _take(plane, place, mask, shift, codes):
    """Enter bits of a plane into codes, or begin them at shift 0."""
    if shift == 0:
        for j in range(plane.size):
            codes[j] = (plane[j] >> place) & mask
    else:
        for j in range(plane.size):
            codes[j] |= ((plane[j] >> place) & mask) << shift


@helper
def pack(codes, bits, out):
    """Pack uint8 codes below ``2**bits`` into ``codes.size * bits // 8`` bytes."""
    count, shift, at = codes.size, 0, 0
    for width in (8, 4, 2, 1):
        if bits & width:
            run = count * width // 8
            plane = out[at : at + run]
            for place in range(8 // width):
                part = codes[place * run : (place + 1) * run]
                _put(part, np.uint8(shift), np.uint8((1 << width) - 1), plane, np.uint8(place * width))
            shift, at = shift + width, at + run


@helper
def unpack(packed, bits, codes):
    """Undo `pack`."""
    count, shift, at = codes.size, 0, 0
    for width in (8, 4, 2, 1):
        if bits & width:
            run = count * width // 8
            plane = packed[at : at + run]
            for place in range(8 // width):
                part = codes[place * run : (place + 1) * run]
                _take(plane, np.uint8(place * width), np.uint8((1 << width) - 1), np.uint8(shift), part)
            shift, at = shift + width, at + run
