"""Records of Python objects, written and read by compiled code; `object_words` describes them.

Numbers, ``bytes``, ``str`` and None travel as they are, and so do arrays and scalars of NumPy (`object_arrays`) and
containers of built-in scalars (`object_items`); small containers of these as pickles.
"""

from .atomics import copy, load, store
from .decorators import helper, linked
from .dispatch_table import ARRAY_TYPE, HEADER, WRITABLE, is_plain
from .object_arrays import (
    array_nbytes,
    describe_array,
    describe_scalar,
    dtype_in,
    get_array,
    get_scalar_of_numpy,
    is_known_array,
    itemsize_at,
    put_shape,
    shape_nbytes,
)
from .object_items import (
    DICT,
    container_of,
    get_items,
    get_scalar,
    is_scalar_size,
    item_of,
    put_items,
    size_of,
    text_data,
    text_nbytes,
)
from .object_words import (
    ALIGNMENT,
    ARRAY,
    BOOL_TYPE,
    BYTES,
    BYTES_TYPE,
    CALL_BITS,
    COMPLEX,
    COMPLEX_TYPE,
    DUMPS,
    FAILED,
    FALSE,
    FEW,
    FLAGS_BIT,
    FLOAT,
    FLOAT_TYPE,
    GATHERED_ROOM,
    HEAD_NBYTES,
    HELD,
    HELD_COUNT,
    INT,
    INT_TYPE,
    ITEMS,
    KIND_BIT,
    LOADS,
    LONG_DATA,
    LONG_ROOM,
    LONG_SOMEWHERE,
    NONE,
    NONE_TYPE,
    ORDINARY,
    OTHER,
    PICKLE,
    ROOM,
    SCALAR,
    SCRATCH,
    SPACE,
    SPACE_USED,
    STR,
    STR_TYPE,
    TABLE,
    TRUE,
    TRUSTED,
    YES,
    kind_of,
    nbytes_of,
    type_of,
)
from .operation_words import get, put
from .python_interface import (
    bytes_data,
    bytes_object,
    bytes_size,
    call_object,
    drop,
    error,
    error_is,
    forget_error,
    int_of,
    str_length,
)


@helper
def is_scalar(words, thing):
    """Return whether an object is of an exact built-in type that needs no copy and runs no code of the program."""
    kind = type_of(words, thing)
    number = kind == get(words, FLOAT_TYPE) or kind == get(words, INT_TYPE) or kind == get(words, COMPLEX_TYPE)
    text = kind == get(words, STR_TYPE) or kind == get(words, BYTES_TYPE)
    return number or text or kind == get(words, BOOL_TYPE) or kind == get(words, NONE_TYPE)


@linked("int64", "int64", "int64")
def has_scalars(words, thing):
    """Return 1 for a container of few scalars, 0 for any other object."""
    container = container_of(words, thing)
    size = -1 if container < 0 else size_of(container, thing)
    if size < 0 or size > FEW:
        return 0
    for place in range(size):
        if not is_scalar(words, item_of(words, container, thing, place)):
            return 0
    return 1


@linked("int64", "int64", "int64")
def has_simple_items(words, thing):
    """Return 1 for a container of few scalars and containers of these, 0 for any other object."""
    container = container_of(words, thing)
    size = -1 if container < 0 else size_of(container, thing)
    if size < 0 or size > FEW:
        return 0
    position = 0
    for place in range(size):
        store(get(words, SCRATCH), position)
        item = item_of(words, container, thing, place)
        position = load(get(words, SCRATCH))
        if not is_scalar(words, item) and has_scalars(words, item) == 0:
            return 0
    return 1


@helper
def _put_head(memory, word, nbytes):
    store(memory, word)
    store(memory + 8, nbytes)
    return nbytes


@helper
def _put_bytes(words, memory, word, data, nbytes, slot):
    if nbytes > LONG_ROOM:
        return OTHER
    if nbytes > ROOM:
        store(get(words, LONG_DATA) + 8 * slot, data)
    else:
        copy(memory + HEAD_NBYTES, data, nbytes)
    return _put_head(memory, word, nbytes)


@helper
def _unless_it_matters(words):
    """Clear an exception, with which the general way meets again; keep one that is none of the object's."""
    if error() != 0 and error_is(get(words, ORDINARY)) == 0:
        return FAILED
    forget_error()
    return OTHER


@helper
def hold(words, thing):
    """Keep a reference for as long as the object's bytes are needed, see `object_calls.ended`."""
    count = get(words, HELD_COUNT)
    store(get(words, HELD) + 8 * count, thing)
    put(words, HELD_COUNT, count + 1)


@linked("int64", "int64", "int64", "int64", "int64", "int64")
def _put_pickle(words, memory, call, thing, slot):
    flags = TRUSTED
    if has_scalars(words, thing) == 0:
        flags = 0
        if has_simple_items(words, thing) == 0:
            return OTHER
    elif container_of(words, thing) == DICT:
        flags = 0  # keys may be of any type
    pickled = call_object(get(words, DUMPS), thing)
    if pickled == 0:
        return _unless_it_matters(words)
    nbytes, word = bytes_size(pickled), call | PICKLE << KIND_BIT | flags << FLAGS_BIT
    if nbytes < 0:
        forget_error()
    written = OTHER if nbytes < 0 else _put_bytes(words, memory, word, bytes_data(pickled), nbytes, slot)
    if written > ROOM:
        hold(words, pickled)
    else:
        drop(pickled)
    return written


@linked("int64", "int64", "int64", "int64", "int64", "int64")
def _put_container(words, memory, call, thing, slot):
    used = get(words, SPACE_USED)
    nbytes = put_items(words, thing, get(words, SPACE) + used, min(LONG_ROOM, GATHERED_ROOM - used))
    if nbytes == 0:
        return _put_pickle(words, memory, call, thing, slot)
    if nbytes > ROOM:
        put(words, SPACE_USED, used + nbytes + -nbytes % ALIGNMENT)
    return _put_bytes(words, memory, call | ITEMS << KIND_BIT, get(words, SPACE) + used, nbytes, slot)


@linked("int64", "int64", "int64", "int64", "int64", "int64", "int64")
def put_array(words, memory, call, array, room, slot):
    """Write a record of an array of up to `room` bytes; see `put_object`."""
    description = describe_array(words, array)
    nbytes, in_shape = array_nbytes(words, array, description), shape_nbytes(description)
    if description == 0 or nbytes > room:
        return OTHER
    data = put_shape(words, memory, array, description)
    if nbytes + in_shape > ROOM:
        store(get(words, LONG_DATA) + 8 * slot, data)
    else:
        copy(memory + HEAD_NBYTES + in_shape, data, nbytes)
    return _put_head(memory, call | description, nbytes)


@helper
def _put_str(words, memory, call, thing, slot):
    if str_length(thing) > LONG_ROOM:
        return OTHER
    data = text_data(words, thing)
    if data == 0:
        return _unless_it_matters(words)
    return _put_bytes(words, memory, call | STR << KIND_BIT, data, text_nbytes(words), slot)


@helper
def _put_int(words, memory, call, thing):
    value = int_of(thing)
    if value == -1 and error() != 0:
        return _unless_it_matters(words)
    store(memory + HEAD_NBYTES, value)
    return _put_head(memory, call | INT << KIND_BIT, 8)


@helper
def _put_other(words, memory, call, thing, slot):
    """Write a record of what is no built-in scalar."""
    if container_of(words, thing) >= 0:
        return _put_container(words, memory, call, thing, slot)
    if type_of(words, thing) == get(get(words, TABLE), ARRAY_TYPE):
        is_writable = is_plain(get(words, TABLE), thing, WRITABLE)
        return put_array(words, memory, call, thing, LONG_ROOM, slot) if is_writable else OTHER
    description = describe_scalar(words, thing)
    if description == 0:
        return OTHER
    fields, nbytes = thing + get(get(words, TABLE), HEADER), itemsize_at(words, dtype_in(description))
    return _put_bytes(words, memory, call | description, fields, nbytes, slot)


@linked("int64", "int64", "int64", "int64", "int64", "int64")
def put_object(words, memory, call, thing, slot):
    """Write a record; return the bytes of the object, or one of `OTHER` and `FAILED`.

    An object of up to LONG_ROOM bytes that has no room in its record is at the address in LONG_DATA of this slot.
    """
    kind, fields = type_of(words, thing), thing + get(get(words, TABLE), HEADER)
    if kind == get(words, FLOAT_TYPE):
        store(memory + HEAD_NBYTES, load(fields))
        return _put_head(memory, call | FLOAT << KIND_BIT, 8)
    if kind == get(words, INT_TYPE):
        return _put_int(words, memory, call, thing)
    if kind == get(words, BYTES_TYPE):
        data = bytes_data(thing)
        return _put_bytes(words, memory, call | BYTES << KIND_BIT, data, bytes_size(thing), slot)
    if kind == get(words, STR_TYPE):
        return _put_str(words, memory, call, thing, slot)
    if kind == get(words, NONE_TYPE):
        return _put_head(memory, call | NONE << KIND_BIT, 0)
    if kind == get(words, BOOL_TYPE):
        return _put_head(memory, call | (TRUE if thing == get(words, YES) else FALSE) << KIND_BIT, 0)
    if kind == get(words, COMPLEX_TYPE):
        store(memory + HEAD_NBYTES, load(fields))
        store(memory + HEAD_NBYTES + 8, load(fields + 8))
        return _put_head(memory, call | COMPLEX << KIND_BIT, 16)
    return _put_other(words, memory, call, thing, slot)


@helper
def description_of(memory, call):
    """Return the first word of a record without the bits of the call."""
    return (load(memory) ^ call) & ~(LONG_SOMEWHERE << FLAGS_BIT)


@linked("int64", "int64", "int64", "int64", "int64")
def is_known(words, memory, call, predictable):
    """Return 1 if `get_object` reads a record, and runs no code of the program if it has to be `predictable`."""
    description, nbytes = description_of(memory, call), nbytes_of(memory)
    kind = kind_of(description)
    if nbytes > LONG_ROOM or description & CALL_BITS != 0:
        return 0
    if kind in (ARRAY, SCALAR):
        return is_known_array(words, memory, description & ~(0xF << KIND_BIT), nbytes)
    if kind == PICKLE:
        trusted = description == PICKLE << KIND_BIT | TRUSTED << FLAGS_BIT
        return 1 if trusted or (description == PICKLE << KIND_BIT and predictable == 0) else 0
    plain = description == kind << KIND_BIT and (kind == ITEMS or (kind <= STR and is_scalar_size(kind, nbytes)))
    return 1 if plain else 0


@linked("int64", "int64", "int64", "int64", "int64")
def get_object(words, memory, description, data):
    """Return the new object of a record, whose bytes are at `data`; 0 with an exception set if it cannot be read."""
    kind, nbytes = kind_of(description), nbytes_of(memory)
    if kind <= STR:
        return get_scalar(words, kind, data, nbytes)
    if kind == ITEMS:
        return get_items(words, data, nbytes)
    if kind == ARRAY:
        return get_array(words, memory, description, data, nbytes)
    if kind == SCALAR:
        return get_scalar_of_numpy(words, description, data)
    pickled = bytes_object(data, nbytes)
    if pickled == 0:
        return 0
    found = call_object(get(words, LOADS), pickled)
    drop(pickled)
    return found


@helper
def get_here(words, memory, call):
    """Return the new object of a record that has its bytes; see `get_object`."""
    description = description_of(memory, call)
    return get_object(words, memory, description, memory + HEAD_NBYTES + shape_nbytes(description))
