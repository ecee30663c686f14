"""Codes of 1 to 8 bits, packed so that vector units can do it: a block of codes becomes planes.

A plane holds the next 8, 4, 2 or 1 bits of every code of the block, from the lowest up. Byte j of a plane of w bits
holds those of codes j, j + n w / 8, j + 2 n w / 8, ... (n codes in the block), so that bytes are made from runs of
codes and no bits cross lanes. Five bits are a plane of four and one of one. The block's length is a multiple of 32.
"""

import numpy as np

from ..bits import pointer
from ..decorators import helper

UNIT = 32
"""Block lengths are multiples of it."""
_SMALL = np.uint8(7)
"""Masks shifts: the compiler keeps a loop in 8-bit lanes if it sees that no shift is longer."""


@helper
def _put_fours(codes, run, shift, out):
    shift &= _SMALL
    a, b = codes, pointer(codes, run)
    for j in range(run):
        out[j] = np.uint8(_field(a[j], shift, 15, 0) | _field(b[j], shift, 15, 4))


@helper
def _put_twos(codes, run, shift, out):
    shift &= _SMALL
    a, b, c, d = codes, pointer(codes, run), pointer(codes, 2 * run), pointer(codes, 3 * run)
    for j in range(run):
        low = _field(a[j], shift, 3, 0) | _field(b[j], shift, 3, 2)
        out[j] = np.uint8(low | _field(c[j], shift, 3, 4) | _field(d[j], shift, 3, 6))


@helper
def _put_ones(codes, run, shift, out):
    shift &= _SMALL
    a, b, c, d = codes, pointer(codes, run), pointer(codes, 2 * run), pointer(codes, 3 * run)
    codes = pointer(codes, 4 * run)
    e, f, g, h = codes, pointer(codes, run), pointer(codes, 2 * run), pointer(codes, 3 * run)
    for j in range(run):
        low = _field(a[j], shift, 1, 0) | _field(b[j], shift, 1, 1) | _field(c[j], shift, 1, 2)
        mid = _field(d[j], shift, 1, 3) | _field(e[j], shift, 1, 4) | _field(f[j], shift, 1, 5)
        out[j] = np.uint8(low | mid | _field(g[j], shift, 1, 6) | _field(h[j], shift, 1, 7))


@helper
def _field(code, shift, mask, place):
    """Return some bits of a code at their place in a byte."""
    return np.uint8(np.uint8(np.uint8(code >> shift) & np.uint8(mask)) << np.uint8(place))


@helper
def _take(plane, run, place, mask, shift, codes):
    """Enter bits of a plane into codes, or begin them at shift 0."""
    place, shift = place & _SMALL, shift & _SMALL
    if shift == 0:
        for j in range(run):
            codes[j] = np.uint8(plane[j] >> place) & mask
    else:
        for j in range(run):
            codes[j] = np.uint8(codes[j] | np.uint8(np.uint8(np.uint8(plane[j] >> place) & mask) << shift))


@helper
def pack_at(codes, count, bits, out):
    """Pack `count` uint8 codes below ``2**bits`` into ``count * bits // 8`` bytes; both are pointers."""
    shift, at = 0, 0
    if bits & 8:
        for j in range(count):
            out[j] = codes[j]
    if bits & 4:
        _put_fours(codes, count // 2, np.uint8(0), out)
        shift, at = 4, count // 2
    if bits & 2:
        _put_twos(codes, count // 4, np.uint8(shift), pointer(out, at))
        shift, at = shift + 2, at + count // 4
    if bits & 1:
        _put_ones(codes, count // 8, np.uint8(shift), pointer(out, at))


@helper
def unpack_at(packed, count, bits, codes):
    """Undo `pack_at`."""
    shift, at = 0, 0
    for width in (8, 4, 2, 1):
        if bits & width:
            run, mask = count * width // 8, np.uint8((1 << width) - 1)
            for place in range(8 // width):
                target = pointer(codes, place * run)
                _take(pointer(packed, at), run, np.uint8(place * width), mask, np.uint8(shift), target)
            shift, at = shift + width, at + run


@helper
def pack(codes, bits, out):
    """Pack uint8 codes below ``2**bits`` into ``codes.size * bits // 8`` bytes."""
    pack_at(pointer(codes, 0), codes.size, bits, pointer(out, 0))


@helper
def unpack(packed, bits, codes):
    """Undo `pack`."""
    unpack_at(pointer(packed, 0), codes.size, bits, pointer(codes, 0))
