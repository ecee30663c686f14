"""Gatherv and Scatterv on shared memory in one compiled call, from the caller's specifications to the result.

See `counted_parts` for what the ranks do. Here arguments are read: arrays of this rank's part, and at the root the
array of all parts with counts and displacements.
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
def _describe_root(table, job, part, spec):
    """Write the root's words; return how many bytes all parts have, -1 for arguments that are left to Python."""
    size, gathers = get(job, SIZE), get(job, COLLECTIVE) == GATHER
    counts, place = job + 8 * read_word(size), 0
    whole = read_fitting(table, spec, size, counts, gathers)
    if whole == 0:
        return -1
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


@linked(*["int64"] * 6)
def make_counted(table, collective, part, whole, root):
    """Make a Gatherv or Scatterv; see `call_counted`."""
    job = get(table, JOB)
    if not is_open(table, job) or (collective == SCATTER and not has_room(get(job, SIZE), get(job, SLOT_NBYTES))):
        return OTHER
    put(job, COLLECTIVE, collective)
    put(job, ROOT, root)
    is_root = get(job, RANK) == root
    part, plan = array_in(table, part, 0, 1, True), get(table, counted_plan_entry(collective, is_root))
    nbytes = _describe_root(table, job, part, whole) if is_root else _describe_part(table, job, part)
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


@takes_objects("int64", "int64", "object", "object", "int64")
def call_counted(table, collective, part, whole, root):
    """Make a blocking Gatherv or Scatterv of ordinary arrays, or begin it; return a status as `dispatch.call` does.

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
    return make_counted(table, collective, part, whole, root)


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
