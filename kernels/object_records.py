"""Records of Python objects, written and read by compiled code; `object_words` describes them.

Numbers, ``bytes``, ``str`` and None travel as they are, and so do arrays and scalars of NumPy (`object_arrays`) and
containers of built-in scalars (`object_items`); everything else as pickles.
"""

from .atomics import copy, load, store
from .decorators import helper, linked
from .dispatch_table import ARRAY_TYPE, HEADER, WRITABLE, data_of, is_plain
from .object_arrays import (
    array_nbytes,
    describe_array,
    describe_scalar,
    dtype_in,
    get_array,
    get_scalar_of_numpy,
    is_known_array,
    itemsize_at,
    shape_nbytes,
    shape_of,
)
from .object_items import container_of, get_items, put_items
from .object_pickles import get_pickled, put_bytes, put_head, put_pickle, unless_it_matters
from .object_scalars import get_scalar, is_scalar_size, text_data, text_nbytes
from .object_words import (
    ALIGNMENT,
    ARRAY,
    BOOL_TYPE,
    BYTES,
    BYTES_TYPE,
    CALL_BITS,
    COMPLEX,
    COMPLEX_TYPE,
    FALSE,
    FLAGS_BIT,
    FLOAT,
    FLOAT_TYPE,
    GATHERED_ROOM,
    HEAD_NBYTES,
    INT,
    INT_TYPE,
    ITEMS,
    KIND_BIT,
    LONG_DATA,
    LONG_ROOM,
    LONG_SOMEWHERE,
    NONE,
    NONE_TYPE,
    OTHER,
    PICKLE,
    ROOM,
    SCALAR,
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
    bytes_size,
    error,
    int_of,
    str_length,
)


@linked("int64", "int64", "int64", "int64", "int64", "int64")
def _put_container(words, memory, call, thing, slot):
    used = get(words, SPACE_USED)
    nbytes = put_items(words, thing, get(words, SPACE) + used, min(LONG_ROOM, GATHERED_ROOM - used))
    if nbytes == 0:
        return put_pickle(words, memory, call, thing, slot)
    if nbytes > ROOM:
        put(words, SPACE_USED, used + nbytes + -nbytes % ALIGNMENT)
    return put_bytes(words, memory, call | ITEMS << KIND_BIT, get(words, SPACE) + used, nbytes, slot)


@linked("int64", "int64", "int64", "int64", "int64", "int64", "int64")
def put_array(words, memory, call, array, room, slot):
    """Write a record of an array of up to `room` bytes; see `put_object`."""
    description = describe_array(words, array)
    nbytes, in_shape = array_nbytes(words, array, description), shape_nbytes(description)
    if description == 0 or nbytes > room:
        return OTHER
    copy(memory + HEAD_NBYTES, shape_of(words, array), in_shape)
    data = data_of(get(words, TABLE), array)
    if nbytes + in_shape > ROOM:
        store(get(words, LONG_DATA) + 8 * slot, data)
    else:
        copy(memory + HEAD_NBYTES + in_shape, data, nbytes)
    return put_head(memory, call | description, nbytes)


@helper
def _put_str(words, memory, call, thing, slot):
    if str_length(thing) > LONG_ROOM:
        return OTHER
    data = text_data(words, thing)
    if data == 0:
        return unless_it_matters(words)
    return put_bytes(words, memory, call | STR << KIND_BIT, data, text_nbytes(words), slot)


@helper
def _put_int(words, memory, call, thing):
    value = int_of(thing)
    if value == -1 and error() != 0:
        return unless_it_matters(words)
    store(memory + HEAD_NBYTES, value)
    return put_head(memory, call | INT << KIND_BIT, 8)


@helper
def _put_other(words, memory, call, thing, slot):
    """Write a record of what is no built-in scalar."""
    if container_of(words, thing) >= 0:
        return _put_container(words, memory, call, thing, slot)
    if type_of(words, thing) == get(get(words, TABLE), ARRAY_TYPE):
        is_writable = is_plain(get(words, TABLE), thing, WRITABLE)
        return put_array(words, memory, call, thing, LONG_ROOM, slot) if is_writable else OTHER
    description = describe_scalar(words, type_of(words, thing))
    if description == 0:
        return put_pickle(words, memory, call, thing, slot)
    fields, nbytes = thing + get(get(words, TABLE), HEADER), itemsize_at(words, dtype_in(description))
    return put_bytes(words, memory, call | description, fields, nbytes, slot)


@linked("int64", "int64", "int64", "int64", "int64", "int64")
def put_object(words, memory, call, thing, slot):
    """Write a record; return the bytes of the object, or one of `OTHER`, `FAILED` and `APART_ALREADY`.

    An object of up to LONG_ROOM bytes that has no room in its record is at the address in LONG_DATA of this slot.
    """
    kind, fields = type_of(words, thing), thing + get(get(words, TABLE), HEADER)
    if kind == get(words, FLOAT_TYPE):
        store(memory + HEAD_NBYTES, load(fields))
        return put_head(memory, call | FLOAT << KIND_BIT, 8)
    if kind == get(words, INT_TYPE):
        return _put_int(words, memory, call, thing)
    if kind == get(words, BYTES_TYPE):
        data = bytes_data(thing)
        return put_bytes(words, memory, call | BYTES << KIND_BIT, data, bytes_size(thing), slot)
    if kind == get(words, STR_TYPE):
        return _put_str(words, memory, call, thing, slot)
    if kind == get(words, NONE_TYPE):
        return put_head(memory, call | NONE << KIND_BIT, 0)
    if kind == get(words, BOOL_TYPE):
        return put_head(memory, call | (TRUE if thing == get(words, YES) else FALSE) << KIND_BIT, 0)
    if kind == get(words, COMPLEX_TYPE):
        store(memory + HEAD_NBYTES, load(fields))
        store(memory + HEAD_NBYTES + 8, load(fields + 8))
        return put_head(memory, call | COMPLEX << KIND_BIT, 16)
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
    return get_pickled(words, data, nbytes)


@helper
def get_here(words, memory, call):
    """Return the new object of a record that has its bytes; see `get_object`."""
    description = description_of(memory, call)
    return get_object(words, memory, description, memory + HEAD_NBYTES + shape_nbytes(description))
