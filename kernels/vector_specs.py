"""Specifications of vector collectives, such as ``[array, counts, MPI.DOUBLE]``, read from the objects by address.

Only the most common forms are read here; all others are left to Python, which knows every form and every error message.
"""

from .atomics import load, load_int32, store
from .buffer_views import whole_in
from .builtin_objects import MOST, items_of, number_at, whole_number
from .decorators import helper
from .dispatch_table import (
    HEADER,
    INT32_DTYPE,
    INT64_DTYPE,
    INT_HAS_TAG,
    INT_TYPE,
    ITEMSIZES,
    NONE,
    READABLE,
    TUPLE_TYPE,
    WRITABLE,
    count_of,
    data_of,
    datatype_number,
    dtype_of,
    is_plain,
    length_of_vector,
    number_of_dtype,
)
from .operation_words import get


@helper
def _read_vector(table, thing, size, out):
    """Read a vector of whole numbers; see `read_numbers`."""
    if not is_plain(table, thing, READABLE) or length_of_vector(table, thing) != size:
        return False
    dtype, data, fits = dtype_of(table, thing), data_of(table, thing), True
    if dtype != get(table, INT64_DTYPE) and dtype != get(table, INT32_DTYPE):
        return False
    wide = dtype == get(table, INT64_DTYPE)
    for rank in range(size):
        number = load(data + 8 * rank) if wide else load_int32(data + 4 * rank)
        fits &= 0 <= number < MOST
        store(out + 8 * rank, number)
    return fits


@helper
def read_numbers(table, thing, size, out):
    """Write the numbers of a list, tuple or vector, one a rank; return False for others, also for negative numbers."""
    if get(table, INT_TYPE) == 0:
        return False
    number, items = items_of(table, thing)
    if number < 0:
        return _read_vector(table, thing, size, out)
    if number != size:
        return False
    for rank in range(size):
        item = load(items + 8 * rank)
        fields = item + get(table, HEADER)
        value = number_at(fields, get(table, INT_HAS_TAG)) if load(fields - 8) == get(table, INT_TYPE) else -1
        if not 0 <= value < MOST:
            return False
        store(out + 8 * rank, value)
    return True


@helper
def _read_numbers(table, given, size, out, is_distance):
    """Read a number for each block, or one for all: a count, or the distance of one block from the next.

    Returns False for others.
    """
    one = whole_number(table, given)
    if one < 0:
        return read_numbers(table, given, size, out)
    for rank in range(size):
        store(out + 8 * rank, rank * one if is_distance else one)
    return True


@helper
def _divide(table, array, size, counts, displs):
    """Divide an array into equal blocks; return False if that is not possible."""
    total = count_of(table, array)
    for rank in range(size):
        store(counts + 8 * rank, total // size)
        store(displs + 8 * rank, total // size * rank)
    return total % size == 0


@helper
def _running_sum(counts, size, displs):
    total = 0
    for rank in range(size):
        store(displs + 8 * rank, total)
        total += load(counts + 8 * rank)


@helper
def read_blocks(table, spec, size, counts, displs):
    """Read ``[array, counts]``, ``[array, counts, MPI.DOUBLE]`` and these with displacements, also as a pair.

    An array alone, or with its datatype, is divided into equal blocks. A number in place of the counts holds for all
    blocks, in place of displacements it is the distance of blocks.

    Parameters
    ----------
    table, spec : int
        Address of a table for plain calls; what `id` says of the specification.
    counts, displs : int
        Addresses of `size` words, which are written, for counts and displacements in elements.

    Returns
    -------
    int
        The array, which is contiguous and has elements of a type in the table; 0 for any other specification. Whether
        the blocks lie in the array is not looked at.
    """
    if get(table, INT_TYPE) == 0:
        return 0
    array = whole_in(table, spec)
    if is_plain(table, array, READABLE):
        return array if number_of_dtype(table, array) >= 0 and _divide(table, array, size, counts, displs) else 0
    number, items = items_of(table, spec)
    if not 2 <= number <= 4:
        return 0
    array = load(items)
    if not is_plain(table, array, READABLE):
        return 0
    dtype = number_of_dtype(table, array)
    if dtype < 0:
        return 0
    if datatype_number(table, load(items + 8 * number - 8)) == dtype:
        number -= 1
    elif number > 2:
        return 0
    return array if read_places(table, items, number, size, counts, displs) else 0


@helper
def read_places(table, items, number, size, counts, displs):
    """Read counts and displacements of blocks: items 1 and 2 of a specification of `number` items without a datatype.

    Returns False for others; see `read_blocks`.
    """
    if number < 2:
        return False
    given, places = load(items + 8), 0
    if number == 3:
        places = load(items + 16)
    elif load(given + get(table, HEADER) - 8) == get(table, TUPLE_TYPE):
        number, items = items_of(table, given)
        if number != 2:
            return False
        given, places = load(items), load(items + 8)
    if not _read_numbers(table, given, size, counts, False):
        return False
    if places == 0 or places == get(table, NONE):
        _running_sum(counts, size, displs)
        return True
    return _read_numbers(table, places, size, displs, True)


@helper
def read_fitting(table, spec, size, counts, written):
    """Do so for blocks that lie in the array, which is writable if they are written; return 0 for others.

    Blocks that are written stand in rank order, so that none overlap. Displacements go behind the counts.
    """
    array = read_blocks(table, spec, size, counts, counts + 8 * size)
    if array == 0 or (written and not is_plain(table, array, WRITABLE)):
        return 0
    available, end = count_of(table, array), 0
    for rank in range(size):
        count, displ = load(counts + 8 * rank), load(counts + 8 * (size + rank))
        if count > available or displ > available - count or (written and count and displ < end):
            return 0
        if count:
            end = displ + count
    return array


@helper
def nbytes_of(table, array):
    """Return the bytes of an array with elements of a type in the table."""
    return count_of(table, array) * get(table, ITEMSIZES + number_of_dtype(table, array))


@helper
def arrays_are_apart(table, one, other):
    """Return whether two arrays with element types of the table have no byte in common."""
    first, second = data_of(table, one), data_of(table, other)
    return first + nbytes_of(table, one) <= second or second + nbytes_of(table, other) <= first


@helper
def are_packed(counts, size, total):
    """Return whether blocks follow each other and have `total` elements; displacements stand behind the counts."""
    end = 0
    for rank in range(size):
        if load(counts + 8 * (size + rank)) != end:
            return False
        end += load(counts + 8 * rank)
    return end == total
