"""Gatherv and Scatterv on shared memory in one compiled call, from the caller's specifications to the result.

See `counted_parts` for what the ranks do. Here arguments are read: arrays of this rank's part, and at the root the
array of all parts with counts and displacements, or entries of derived datatypes.
"""

from .atomics import load
from .buffer_views import array_in
from .compared_calls import must_compare
from .counted_parts import offered_by_root
from .decorators import helper, linked, short_kernel
from .dispatch import begin, is_open
from .dispatch_table import (
    CHECKED,
    IN_PLACE,
    ITEMSIZES,
    JOB,
    METHOD,
    READABLE,
    WRITABLE,
    count_of,
    counted_plan_entry,
    data_of,
    is_plain,
    number_of_dtype,
    pack_call,
)
from .executor import progress, start
from .object_kernels import takes_objects
from .operation_words import (
    AT_ONCE_NBYTES,
    BOUNDS,
    CALL,
    CAREFUL,
    COLLECTIVE,
    COUNT,
    GATHER,
    IDLE,
    ITEMSIZE,
    OTHER,
    PART_DTYPE,
    PART_NBYTES,
    RANK,
    RECV,
    REDUCER,
    ROOT,
    SCATTER,
    SEND,
    SIZE,
    SLOT_NBYTES,
    STATE,
    TIME_NEXT,
    WAITING,
    WRONG_PART,
    get,
    put,
    read_word,
)
from .operation_words import METHOD as JOB_METHOD
from .packed_blocks import packed_blocks
from .packed_views import begin_packed, end_packed, packed_in
from .scattered_parts import has_room
from .uneven_parts import hash_of_counts
from .vector_specs import arrays_are_apart, nbytes_of, read_fitting


@helper
def counted_call(collective, root):
    """Return the packed call of a Gatherv or Scatterv in one round."""
    return pack_call(collective, 0, 0, collective, root)


@helper
def lengths_of(job, nbytes):
    """Return a number for what this rank knows of the lengths: of `nbytes` bytes, and at the root of all counts."""
    is_root = get(job, RANK) == get(job, ROOT)
    return hash_of_counts(get(job, BOUNDS), get(job, SIZE)) if is_root else 1 + nbytes


@helper
def _fits(table, job, part, whole, own):
    """Return whether an array can be the root's part, of `own` elements, of an array that has all parts."""
    is_read = get(job, COLLECTIVE) == GATHER
    if not is_plain(table, part, READABLE if is_read else WRITABLE) or count_of(table, part) != own:
        return False
    is_alike = own == 0 or number_of_dtype(table, part) == number_of_dtype(table, whole)
    return is_alike and number_of_dtype(table, part) >= 0 and arrays_are_apart(table, part, whole)


@helper
def _describe_root(table, job, part, whole):
    """Write the root's words; return how many bytes all parts have, -1 for arguments that are left to Python."""
    gathers, counts, place = get(job, COLLECTIVE) == GATHER, job + 8 * read_word(get(job, SIZE)), 0
    if part != get(table, IN_PLACE):
        if not _fits(table, job, part, whole, load(counts + 8 * get(job, RANK))):
            return -1
        place = data_of(table, part)
    put(job, SEND, place if gathers else data_of(table, whole))
    put(job, RECV, data_of(table, whole) if gathers else place)
    put(job, BOUNDS, counts)
    put(job, ITEMSIZE, get(table, ITEMSIZES + number_of_dtype(table, whole)))
    put(job, PART_NBYTES, offered_by_root(job))
    put(job, PART_DTYPE, number_of_dtype(table, whole))
    return nbytes_of(table, whole)


@helper
def _describe_part(table, job, part):
    """Write the words of a rank that is not the root; return the bytes of its part, -1 as above."""
    gathers = get(job, COLLECTIVE) == GATHER
    if not is_plain(table, part, READABLE if gathers else WRITABLE) or number_of_dtype(table, part) < 0:
        return -1
    put(job, SEND if gathers else RECV, data_of(table, part))
    put(job, PART_NBYTES, nbytes_of(table, part))
    put(job, PART_DTYPE, number_of_dtype(table, part))
    return get(job, PART_NBYTES)


@helper
def _is_possible(table, job, collective):
    """Return whether a call can be made from here now."""
    return is_open(table, job) and (collective != SCATTER or has_room(get(job, SIZE), get(job, SLOT_NBYTES)))


@helper
def _make(table, job, collective, part, whole, root):
    """Make a call of arrays; at the root the counts of parts of `whole` have been read to the job, 0 is no array."""
    is_root = get(job, RANK) == root
    if is_root and whole == 0:
        return OTHER
    put(job, COLLECTIVE, collective)
    put(job, ROOT, root)
    nbytes = _describe_root(table, job, part, whole) if is_root else _describe_part(table, job, part)
    plan = get(table, counted_plan_entry(collective, is_root))
    if plan == 0 or nbytes < 0:
        return OTHER
    put(job, CALL, counted_call(collective, root))
    put(job, COUNT, 0)
    put(job, REDUCER, 0)
    put(job, JOB_METHOD, get(table, METHOD))
    put(job, TIME_NEXT, 0)
    put(job, WRONG_PART, 0)
    if get(table, CHECKED):
        put(job, CAREFUL, int(must_compare(table, get(job, CALL), lengths_of(job, nbytes))))
    begin(table, job, plan, True)
    return progress(job, 0) if nbytes <= AT_ONCE_NBYTES else WAITING


@linked(*["int64"] * 6)
def _make_call(table, collective, part, whole, root):
    """Make a Gatherv or Scatterv of ordinary arrays; see `call_counted`."""
    job, size, gathers = get(table, JOB), get(get(table, JOB), SIZE), collective == GATHER
    if not _is_possible(table, job, collective):
        return OTHER
    if get(job, RANK) == root:
        whole = read_fitting(table, whole, size, job + 8 * read_word(size), gathers)
    return _make(table, job, collective, array_in(table, part, 0, 1, True), whole, root)


@linked(*["int64"] * 6)
def _make_packed_call(table, collective, part, whole, root):
    """Make a Gatherv or Scatterv whose arguments may be entries of derived datatypes; see `call_counted`."""
    job, size, gathers = get(table, JOB), get(get(table, JOB), SIZE), collective == GATHER
    if not _is_possible(table, job, collective) or not begin_packed(table):
        return OTHER
    place, numbers = int(gathers), job + 8 * read_word(size)
    if get(job, RANK) == root:
        is_read = not gathers or part == get(table, IN_PLACE)
        packed = packed_blocks(table, whole, place, size, numbers, is_read)
        whole = packed if packed != 0 else read_fitting(table, whole, size, numbers, gathers)
    part = array_in(table, packed_in(table, part, 1 - place, 1, 0, gathers), 1 - place, 1, True)
    return end_packed(table, _make(table, job, collective, part, whole, root))


@takes_objects("int64", "int64", "object", "object", "int64")
def call_counted(table, collective, part, whole, root):
    """Make a blocking Gatherv or Scatterv, or begin it; return a status as `dispatch.call` does, with PACKED.

    Parameters
    ----------
    table : int
        Address of `table_words` words.
    collective : int
        GATHER or SCATTER.
    part : object
        This rank's part; at the root it may be IN_PLACE.
    whole : object
        At the root the specification of the array of all parts, with counts.
    root : int
        A rank of the communicator.
    """
    status = _make_call(table, collective, part, whole, root)
    return status if status != OTHER else _make_packed_call(table, collective, part, whole, root)


@short_kernel("int64", "int64")
def begin_counted(job, nbytes):
    """Begin an operation whose words Python has written; return a status, OTHER if the job's last one has not ended.

    Parameters
    ----------
    job : int
        Address of the job.
    nbytes : int
        Bytes that this rank has to copy.
    """
    if get(job, STATE) != IDLE:
        return OTHER
    if get(job, RANK) == get(job, ROOT):
        put(job, PART_NBYTES, offered_by_root(job))
    start(job)
    return progress(job, 0) if nbytes <= AT_ONCE_NBYTES else WAITING


@short_kernel("int64", "int64")
def lengths_number(job, nbytes):
    """Return a number by which the lengths that this rank knows are compared the first time; see `lengths_of`."""
    return lengths_of(job, nbytes)
