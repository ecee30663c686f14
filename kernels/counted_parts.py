"""Rows of Gatherv and Scatterv in one round: what the executor does for OFFER_PARTS, GIVE_PARTS and TAKE_PARTS.

See `gathered_parts` and `scattered_parts`. Plans hold the address of `exchange_parts`, so that programs that call
neither do not wait for its compilation.
"""

from .atomics import load
from .decorators import helper, kernel_for, native
from .gathered_parts import expected_nbytes, give_part, offer_part, places_nbytes, take_parts
from .instructions import GIVE_PARTS, OFFER_PARTS
from .operation_words import (
    COLLECTIVE,
    GATHER,
    PART_DTYPE,
    PART_NBYTES,
    PLACE,
    RANK,
    RECORD_PART_KIND,
    RECORD_PART_NBYTES,
    ROOT,
    SIZE,
    get,
    has_counted_parts,
)
from .part_offers import DTYPE_BIT, current_record
from .scattered_parts import give_parts, offer_parts, offered_nbytes, offered_to, take_part


@helper
def offered_by_root(job):
    """Return how many bytes of its slot the root uses."""
    return places_nbytes(job) if get(job, COLLECTIVE) == GATHER else offered_nbytes(job)


@native("int64", "int64", "int64")
def exchange_parts(job, what):
    """Execute a row; return DONE, WAITING, MISMATCH or LOST."""
    gathers = get(job, COLLECTIVE) == GATHER
    if what == OFFER_PARTS:
        return offer_part(job) if gathers else offer_parts(job)
    if what == GIVE_PARTS:
        return give_part(job) if gathers else give_parts(job)
    return take_parts(job) if gathers else take_part(job)


@kernel_for("int64")
def awaited(job):
    """Return the rank for which an operation waits at work; -1 if it has no counted parts, or waits for all."""
    if not has_counted_parts(job):
        return -1
    rank, root = get(job, RANK), get(job, ROOT)
    if rank != root:
        return root
    return (rank + get(job, PLACE)) % get(job, SIZE) if get(job, COLLECTIVE) == GATHER else -1


@kernel_for("int64", "int64", "int64[1C]")
def part_of_rank(job, rank, out):
    """Write bytes and element type of what a rank gives to this one, and what this one expects, to `out`, (4,)."""
    record, gathers = current_record(job, rank), get(job, COLLECTIVE) == GATHER
    out[0] = load(record + 8 * RECORD_PART_NBYTES) if gathers else offered_to(job)
    out[1] = load(record + 8 * RECORD_PART_KIND) >> DTYPE_BIT
    out[2], out[3] = expected_nbytes(job, rank) if gathers else get(job, PART_NBYTES), get(job, PART_DTYPE)
