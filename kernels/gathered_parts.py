"""Gatherv on shared memory in one round: each rank offers its part with its length, and the root takes all parts.

::

    rank 0 (root), counts 2 0 3000 9     rank 1             rank 2                  rank 3
    ENTER, STARTED                       ENTER              ENTER                   ENTER
    MEET all: the calls agree            OFFER 0 elements   OFFER, in place         OFFER, slot <- part
    AT_WORK all                          STARTED            STARTED                 STARTED
    TAKE: all lengths agree?             END                GIVE: wait until root   END
          copy part of 0, 1, 2, 3                                is done
    DONE, END                                               END

Where a part has more than 32 KB, or than a slot, and the others can write to the root's recvbuf, the root's slot has a
table of the lengths and places of all parts, and a rank with a long part copies it to its place itself, while others do
the same:

    GIVE: root has started? lengths agree? copy the part, DONE      TAKE: wait until the rank is done

FILLED of a rank's record is what the rank writes, TAKEN what the root writes (`part_offers`). The first time that a
rank makes a call with this length it waits until the root is done all the same, so that both hear of a difference.
"""

from .atomics import copy, load, store, store_release
from .call_records import go_to_work, has_reached, meet, publish, wait_done
from .decorators import helper
from .operation_words import (
    BOUNDS,
    CAREFUL,
    DONE,
    ITEMSIZE,
    LEAVING,
    LOST,
    MISMATCH,
    PART_DTYPE,
    PART_KIND,
    PART_NBYTES,
    PLACE,
    RANK,
    RECORD_FILLED,
    RECORD_PART,
    RECORD_PART_KIND,
    RECORD_PART_NBYTES,
    RECORD_TAKEN,
    RECV,
    ROOT,
    SEND,
    SIZE,
    SLOT_NBYTES,
    SLOTS,
    STATE,
    WAITING,
    WORKED,
    WRONG_PART,
    get,
    put,
    slot_offset,
)
from .part_offers import (
    DTYPE_BIT,
    IN_PLACE,
    IN_SLOT,
    copy_in_place,
    copy_to_place,
    current_record,
    is_long_for,
    is_sound,
    kind_for,
    kind_in,
    mark,
    offered_place,
    offset_for,
    segment_nbytes,
    segment_place,
)

_ENTRY_NBYTES = 16
"""Bytes of a rank's entry in the root's table: the length of its part, and the address of its place."""
_SHORT_NBYTES = 32 << 10
"""Up to this length a part passes through the slot, although it could be copied from where it is: its rank goes on at
once. With 8 ranks on 2 cores parts of 128 KB take 230 us so, and 42 us in place."""
_PUSHED = -1
"""In WORKED: the part has been copied to its place."""
_WORK_NBYTES = 32 << 20
"""Bytes after which the root returns, so that signals and deadlines are noticed."""


# The rank that gives a part -------------------------------------------------------------------------------------------


@helper
def _fill(job, number):
    """Copy a segment of this rank's part to its half; return False if there is no such segment."""
    kind, nbytes = get(job, PART_KIND), get(job, PART_NBYTES)
    length = segment_nbytes(job, kind)
    first = number * length
    if first >= nbytes:
        return False
    place = segment_place(job, get(job, RANK), kind, offset_for(job, kind), number)
    copy(place, get(job, SEND) + first, min(length, nbytes - first))
    return True


@helper
def offer_part(job):
    """Write to the record where the part is, and copy its first two segments if it is copied; return DONE."""
    rank, nbytes = get(job, RANK), get(job, PART_NBYTES)
    record = current_record(job, rank)
    if rank == get(job, ROOT):
        _offer_places(job, record)
        return DONE
    is_long = is_long_for(job, nbytes, _SHORT_NBYTES)
    kind = kind_for(job, get(job, SEND), nbytes, True) if is_long else IN_SLOT
    put(job, PART_KIND, kind)
    put(job, WORKED, 2)  # the next segment to fill
    store(record + 8 * RECORD_PART, get(job, SEND) if kind == IN_PLACE else offset_for(job, kind))
    store(record + 8 * RECORD_PART_NBYTES, nbytes)
    store(record + 8 * RECORD_PART_KIND, kind | get(job, PART_DTYPE) << DTYPE_BIT)
    store_release(record + 8 * RECORD_FILLED, mark(job, 2))
    store_release(record + 8 * RECORD_TAKEN, mark(job, 0))
    if kind != IN_PLACE and _fill(job, 0):
        _fill(job, 1)
    return DONE


@helper
def _push(job):
    """Copy a long part to its place at the root, if it can be reached; return a status."""
    root, nbytes = get(job, ROOT), get(job, PART_NBYTES)
    status = meet(job, root)
    if status != DONE or kind_in(current_record(job, root)) != IN_PLACE:
        return status
    entry = offered_place(job, root)
    if not is_sound(job, root, IN_SLOT, entry, _ENTRY_NBYTES * get(job, SIZE)):
        return DONE
    entry += get(job, SLOTS) + _ENTRY_NBYTES * get(job, RANK)
    target = load(entry + 8)
    if load(entry) != nbytes or not is_sound(job, root, IN_PLACE, target, nbytes):
        return DONE  # the root sees that, and tells this rank, which waits for it
    if not go_to_work(job, root):
        return MISMATCH
    if not copy_to_place(job, root, target, get(job, SEND), nbytes):
        return LOST
    publish(job, 1, LEAVING)
    put(job, WORKED, _PUSHED)
    return DONE


@helper
def give_part(job):
    """Copy the segments that follow, and wait for the root where it needs this rank; return a status."""
    if get(job, PART_KIND) == IN_PLACE and get(job, WORKED) != _PUSHED:
        status = _push(job)
        if status != DONE:
            return status
    put(job, STATE, LEAVING)
    record, kind = current_record(job, get(job, RANK)), get(job, PART_KIND)
    while kind != IN_PLACE and get(job, WORKED) * segment_nbytes(job, kind) < get(job, PART_NBYTES):
        number = get(job, WORKED)
        if not has_reached(job, record + 8 * RECORD_TAKEN, mark(job, number - 1)):
            return WAITING
        _fill(job, number)
        put(job, WORKED, number + 1)
        store_release(record + 8 * RECORD_FILLED, mark(job, number + 1))
    is_read = kind == IN_PLACE and get(job, WORKED) != _PUSHED
    if (is_read or get(job, CAREFUL)) and not wait_done(job, get(job, ROOT)):
        return WAITING
    return DONE


# The root -------------------------------------------------------------------------------------------------------------


@helper
def expected_nbytes(job, rank):
    """Return the bytes of a rank's part; at BOUNDS are the counts of all ranks, and behind them the displacements."""
    return load(get(job, BOUNDS) + 8 * rank) * get(job, ITEMSIZE)


@helper
def places_nbytes(job):
    """Return how many bytes of its slot the root uses: for the table, if there are long parts and it has room."""
    table, longest = _ENTRY_NBYTES * get(job, SIZE), 0
    for rank in range(get(job, SIZE)):
        if rank != get(job, RANK):
            longest = max(longest, expected_nbytes(job, rank))
    return table if is_long_for(job, longest, _SHORT_NBYTES) and table <= get(job, SLOT_NBYTES) else 0


@helper
def _offer_places(job, record):
    """Write the table and the root's record; its kind is IN_PLACE if others can write to recvbuf."""
    table = slot_offset(job, get(job, RANK))
    kind = kind_for(job, get(job, RECV), 0, True) if get(job, PART_NBYTES) else IN_SLOT
    for rank in range(get(job, SIZE) if kind == IN_PLACE else 0):
        entry = get(job, SLOTS) + table + _ENTRY_NBYTES * rank
        store(entry, expected_nbytes(job, rank))
        store(entry + 8, _target(job, rank))
    put(job, PART_KIND, kind)
    put(job, WORKED, 0)  # the next segment to take
    store(record + 8 * RECORD_PART, table)
    store(record + 8 * RECORD_PART_KIND, kind)


@helper
def _target(job, rank):
    """Return where a rank's part belongs."""
    return get(job, RECV) + load(get(job, BOUNDS) + 8 * (get(job, SIZE) + rank)) * get(job, ITEMSIZE)


@helper
def _find_wrong(job):
    """Return one more than the first rank whose part is not the one that the root expects, 0 if all are."""
    for rank in range(get(job, SIZE)):
        if rank == get(job, RANK):
            continue
        record = current_record(job, rank)
        nbytes = load(record + 8 * RECORD_PART_NBYTES)
        dtype = load(record + 8 * RECORD_PART_KIND) >> DTYPE_BIT
        if nbytes != expected_nbytes(job, rank) or (nbytes and dtype != get(job, PART_DTYPE)):
            return rank + 1
        if nbytes and not is_sound(job, rank, kind_in(record), offered_place(job, rank), nbytes):
            return rank + 1
    return 0


@helper
def _take_segments(job, rank, kind, nbytes):
    """Copy a part from slot or stage; return DONE or WAITING."""
    record, length = current_record(job, rank), segment_nbytes(job, kind)
    offset, target = offered_place(job, rank), _target(job, rank)
    while get(job, WORKED) * length < nbytes:
        number = get(job, WORKED)
        first = number * length
        if number > 1 and not has_reached(job, record + 8 * RECORD_FILLED, mark(job, number + 1)):
            return WAITING
        copy(target + first, segment_place(job, rank, kind, offset, number), min(length, nbytes - first))
        put(job, WORKED, number + 1)
        if 2 * length < nbytes:
            store_release(record + 8 * RECORD_TAKEN, mark(job, number + 1))
    put(job, WORKED, 0)
    return DONE


@helper
def _take_from(job, rank):
    """Copy the part of a rank; return DONE, WAITING, or LOST if its process cannot be accessed."""
    nbytes, target, kind = expected_nbytes(job, rank), _target(job, rank), kind_in(current_record(job, rank))
    if rank == get(job, RANK):
        source = get(job, SEND)
        if source and source != target:
            copy(target, source, nbytes)
        return DONE
    if nbytes == 0 or kind != IN_PLACE:
        return _take_segments(job, rank, kind, nbytes)
    if get(job, PART_KIND) == IN_PLACE:
        return DONE if wait_done(job, rank) else WAITING
    return DONE if copy_in_place(job, rank, target, offered_place(job, rank), nbytes) else LOST


@helper
def take_parts(job):
    """Check all parts, and copy them, from PLACE on; return a status."""
    size, own, copied = get(job, SIZE), get(job, RANK), 0
    if get(job, PLACE) == 0:
        put(job, WRONG_PART, _find_wrong(job))
        if get(job, WRONG_PART):
            return MISMATCH
    while get(job, PLACE) < size:
        rank = (own + get(job, PLACE)) % size
        status = _take_from(job, rank)
        if status != DONE:
            return status
        put(job, PLACE, get(job, PLACE) + 1)
        copied += expected_nbytes(job, rank)
        if copied >= _WORK_NBYTES:
            return WAITING
    put(job, PLACE, 0)
    return DONE
