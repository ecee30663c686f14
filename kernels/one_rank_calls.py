"""Vector collectives of a communicator with one rank: its block is copied from one specification to the other."""

from .atomics import copy, load
from .buffer_views import array_in
from .decorators import helper
from .dispatch import is_open
from .dispatch_table import IN_PLACE, ITEMSIZES, JOB, READABLE, WRITABLE, count_of, data_of, is_plain, number_of_dtype
from .object_kernels import takes_objects
from .operation_words import AT_ONCE_NBYTES, DONE, OTHER, get, read_word
from .vector_specs import arrays_are_apart, read_fitting


@helper
def _block_of(table, thing, place):
    """Return the array of a block, its first element and their number; 0, 0, 0 for what is left to Python.

    The block is written if the `place` of a view of it is 1, else read.
    """
    array = array_in(table, thing, place, 1, True)
    if is_plain(table, array, WRITABLE if place else READABLE):
        return array, 0, count_of(table, array)
    counts = get(table, JOB) + 8 * read_word(1)
    array = read_fitting(table, thing, 1, counts, place == 1)
    return (array, load(counts + 8), load(counts)) if array != 0 else (0, 0, 0)


@takes_objects("int64", "object", "object")
def copy_block(table, send, recv):
    """Make a vector collective without a reduction; return DONE, or OTHER, having done nothing.

    Parameters
    ----------
    table : int
        Address of a table for plain calls of a communicator with one rank.
    send, recv : object
        Arrays, or specifications with one count and displacement; one of them may be IN_PLACE.
    """
    if not is_open(table, get(table, JOB)):
        return OTHER
    if send == get(table, IN_PLACE) or recv == get(table, IN_PLACE):
        is_written = recv != get(table, IN_PLACE)
        array, _, _ = _block_of(table, recv if is_written else send, int(is_written))
        return DONE if array != 0 and send != recv else OTHER
    source, first, count = _block_of(table, send, 0)
    target, begin, room = _block_of(table, recv, 1)
    if source == 0 or target == 0 or count != room or number_of_dtype(table, source) < 0:
        return OTHER
    itemsize = get(table, ITEMSIZES + number_of_dtype(table, source))
    if number_of_dtype(table, source) != number_of_dtype(table, target) or count * itemsize > AT_ONCE_NBYTES:
        return OTHER
    if not arrays_are_apart(table, source, target):
        return OTHER
    copy(data_of(table, target) + begin * itemsize, data_of(table, source) + first * itemsize, count * itemsize)
    return DONE
