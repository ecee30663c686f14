"""Known reductions: those that only MPI_Reduce_local executes and that were made before, in one compiled call.

Python makes the first reduction of a kind, see `mpicoll.collectives.gathered_reductions`, and leaves a row: the element
types, datatypes, lengths and operation by which arguments of later calls are known, and memory for the vectors of all
ranks. A later call copies its vector there, gathers those of the others, and has MPI_Reduce_local combine them.
"""

from .atomics import copy, load, load_int32, store
from .builtin_objects import items_of
from .decorators import helper, short_kernel
from .dispatch import FOR_SHARED, UNEVEN, is_open, make_call
from .dispatch_table import (
    HEADER,
    IN_PLACE,
    JOB,
    READABLE,
    WRITABLE,
    count_of,
    data_of,
    dtype_of,
    is_in_c_order,
    is_plain,
)
from .messages import reduce_local
from .object_kernels import takes_objects
from .operation_words import ALLGATHER, DONE, OTHER, get

ROWS = 8
NOT_COMBINED = 64
"""No status of a plan: MPI_Reduce_local has returned an error, which is CODE."""
(
    IN_USE,  # 1 from the begin of a call to its end
    CODE,  # error code of MPI_Reduce_local
    BEGUN,  # address of the row of the call that has begun
    RESULT,  # where its result goes
    REDUCE_LOCAL,  # address of the function
    HANDLE_NBYTES,  # bytes of an operation's handle, 4 or 8
    FIRST_ROW,
) = range(7)
"""Words of a table; rows follow."""
MOST_RUNS = 2
(
    COLLECTIVE,  # number of the collective; -1: the row is empty
    OP,  # id of the operation, and its handle
    OP_HANDLE,
    ROOT,
    SEND_DTYPE,  # id of the element type of the array; 0: IN_PLACE
    SEND_TYPE,  # id of the datatype beside it, 0: none
    SEND_LENGTH,  # elements of the array
    RECV_DTYPE,  # 0: this rank gets no result
    RECV_TYPE,
    RECV_LENGTH,
    ENTRIES,  # of the datatype, and its handle
    TYPE_HANDLE,
    NBYTES,  # of a vector, and up to the last byte that an entry has
    END,
    PARTS,  # address of words of parts, see `dispatch.call`
    OWN,  # addresses of the arrays for this rank's vector and for all of them, and of their elements
    OWN_DATA,
    ALL,
    ALL_DATA,
    LAST,  # number of the vector with which combining begins; -1: there is no result
    EXTENT,  # of an entry, and the number of its runs, 0 if it has no gaps
    RUNS,
    FIRST_RUN,  # offset and length of each
) = range(23)
ROW_WORDS = FIRST_RUN + 2 * MOST_RUNS
TABLE_WORDS = FIRST_ROW + ROWS * ROW_WORDS


@helper
def _array_of(table, thing, dtype, datatype, count, flags):
    """Return the array of an argument with this element type, datatype (0: none) and count; 0 for any other."""
    array = thing
    if datatype != 0:
        number, items = items_of(table, thing)
        if number != 2 or load(items + 8) != datatype:
            return 0
        array = load(items)
    if not is_plain(table, array, flags) or not is_in_c_order(table, array):
        return 0
    return array if dtype_of(table, array) == dtype and count_of(table, array) == count else 0


@helper
def _read(known, table, row, send, recv):
    """Note where the vectors are if the arguments are those of a row; return the address of this rank's, 0 if not."""
    target = 0
    if load(row + 8 * RECV_DTYPE) != 0:
        dtype, datatype = load(row + 8 * RECV_DTYPE), load(row + 8 * RECV_TYPE)
        array = _array_of(table, recv, dtype, datatype, load(row + 8 * RECV_LENGTH), WRITABLE)
        if array == 0:
            return 0
        target = data_of(table, array)
    source = target
    if load(row + 8 * SEND_DTYPE) == 0:
        if send != get(table, IN_PLACE):
            return 0
    else:
        dtype, datatype = load(row + 8 * SEND_DTYPE), load(row + 8 * SEND_TYPE)
        array = _array_of(table, send, dtype, datatype, load(row + 8 * SEND_LENGTH), READABLE)
        if array == 0:
            return 0
        source, end = data_of(table, array), load(row + 8 * END)
        if target != 0 and source != target and source < target + end and target < source + end:
            return 0  # an error, which Python tells
    store(known + 8 * RESULT, target)
    return source


@helper
def _find(known, table, collective, send, recv, op, root):
    """Return the row of a call and the address of this rank's vector; 0, 0 if there is none."""
    at = op + get(table, HEADER)
    for number in range(ROWS):
        row = known + 8 * (FIRST_ROW + ROW_WORDS * number)
        if load(row + 8 * COLLECTIVE) != collective or load(row + 8 * OP) != op or load(row + 8 * ROOT) != root:
            continue
        handle = load(at) if load(known + 8 * HANDLE_NBYTES) == 8 else load_int32(at)
        source = _read(known, table, row, send, recv) if handle == load(row + 8 * OP_HANDLE) else 0
        if source != 0:
            return row, source
    return 0, 0


@helper
def _put_result(row, target, combined):
    """Copy entries to their places; gaps in them are not written."""
    runs, extent = load(row + 8 * RUNS), load(row + 8 * EXTENT)
    if runs == 0:
        copy(target, combined, load(row + 8 * NBYTES))
        return
    for entry in range(load(row + 8 * ENTRIES)):
        for run in range(runs):
            offset = extent * entry + load(row + 8 * (FIRST_RUN + 2 * run))
            copy(target + offset, combined + offset, load(row + 8 * (FIRST_RUN + 2 * run + 1)))


@helper
def _combine(known, row):
    """Combine the vectors of all ranks in their order; return DONE or NOT_COMBINED."""
    nbytes, vectors, last = load(row + 8 * NBYTES), load(row + 8 * ALL_DATA), load(row + 8 * LAST)
    combined = vectors + nbytes * last
    for number in range(last - 1, -1, -1):
        code = reduce_local(
            load(known + 8 * REDUCE_LOCAL),
            vectors + nbytes * number,
            combined,
            load(row + 8 * ENTRIES),
            load(row + 8 * TYPE_HANDLE),
            load(row + 8 * OP_HANDLE),
        )
        if code != 0:
            store(known + 8 * CODE, code)
            return NOT_COMBINED
    if last >= 0:
        _put_result(row, load(known + 8 * RESULT), combined)
    return DONE


@takes_objects("int64", "int64", "int64", "object", "object", "object", "int64")
def reduce_known(known, table, collective, send, recv, op, root):
    """Make a reduction that is known, or begin it; return a status.

    DONE: the result is there. OTHER: nothing has happened. NOT_COMBINED: MPI_Reduce_local has failed. Others:
    the gathering has begun; after it `combine_known` has to be called, and IN_USE to be set to 0.

    Parameters
    ----------
    known, table : int
        Address of TABLE_WORDS words; of the table for plain calls.
    collective, root : int
        Its number, as the rows have it; the root, 0 where there is none.
    send, recv, op : object
        The caller's objects.
    """
    if load(known + 8 * IN_USE) or not is_open(table, get(table, JOB)):
        return OTHER
    row, source = _find(known, table, collective, send, recv, op, root)
    if row == 0:
        return OTHER
    store(known + 8 * IN_USE, 1)
    store(known + 8 * BEGUN, row)
    copy(load(row + 8 * OWN_DATA), source, load(row + 8 * END))
    own, vectors = load(row + 8 * OWN), load(row + 8 * ALL)
    status = make_call(table + FOR_SHARED, ALLGATHER + UNEVEN, own, vectors, 0, load(row + 8 * PARTS))
    if status == DONE:
        status = _combine(known, row)
    elif status != OTHER:
        return status
    store(known + 8 * IN_USE, 0)
    return status


@short_kernel("int64")
def combine_known(known):
    """Combine the vectors of a call that has begun; return DONE or NOT_COMBINED."""
    return _combine(known, load(known + 8 * BEGUN))
