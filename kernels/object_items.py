"""Lists, tuples and dictionaries of scalars, arrays and each other as bytes, written and read by compiled code.

A pickle of a small dictionary takes longer than its broadcast. Here a word says which container it is and how many
items it has; the items follow, of a dictionary a key and a value each: scalars as in `object_scalars`, arrays and
scalars of NumPy with what the first word of a record says of them and their shape, containers like this one.
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
from .object_scalars import NUMBER_BIT, corrupt, get_item, padded, put_item
from .object_words import (
    ARRAY,
    DICT_TYPE,
    FRAME_WORDS,
    KIND_BIT,
    LIST_TYPE,
    MAX_DEPTH,
    MAX_SEEN,
    SCALAR,
    SEEN,
    STACK,
    TABLE,
    TUPLE_TYPE,
    kind_of,
    type_of,
)
from .operation_words import get
from .python_interface import (
    dict_next,
    dict_object,
    dict_size,
    drop,
    list_item,
    list_object,
    list_size,
    set_dict_item,
    set_item,
    set_tuple_item,
    tuple_item,
    tuple_object,
    tuple_size,
)

LIST, TUPLE, DICT = 16, 17, 18
"""Kinds of containers, beside those of scalars and arrays."""
_THING, _CONTAINER, _PLACE, _SIZE, _POSITION, _KEY, _VALUE = range(0, 8 * FRAME_WORDS, 8)
"""Offsets in a frame: the container that is being written or made, its kind, the place of the next item and how many
there are, keys and values of dictionaries each; where `dict_next` stands, and what it has found."""


@helper
def container_of(words, thing):
    """Return which container an object is; -1 for any other."""
    kind = type_of(words, thing)
    if kind == get(words, LIST_TYPE):
        return LIST
    if kind == get(words, TUPLE_TYPE):
        return TUPLE
    return DICT if kind == get(words, DICT_TYPE) else -1


@helper
def size_of(container, thing):
    """Return how many items a container has."""
    if container == LIST:
        return list_size(thing)
    return tuple_size(thing) if container == TUPLE else dict_size(thing)


@helper
def item_of(container, thing, place):
    """Return the item of a list or tuple at a place."""
    return list_item(thing, place) if container == LIST else tuple_item(thing, place)


@helper
def _frame_at(words, depth):
    return get(words, STACK) + 8 * FRAME_WORDS * depth


@helper
def _push(words, depth, thing, container, size):
    frame = _frame_at(words, depth)
    store(frame + _THING, thing)
    store(frame + _CONTAINER, container)
    store(frame + _PLACE, 0)
    store(frame + _SIZE, 2 * size if container == DICT else size)
    store(frame + _POSITION, 0)
    store(frame + _KEY, 0)


# Writing --------------------------------------------------------------------------------------------------------------


@helper
def _is_new(words, thing, count):
    """Enter an object that may be changed; return whether it was not there.

    Where one occurs twice, the pickler makes one object of it, too.
    """
    seen = get(words, SEEN)
    for place in range(count):
        if load(seen + 8 * place) == thing:
            return False
    if count < MAX_SEEN:
        store(seen + 8 * count, thing)
    return count < MAX_SEEN


@helper
def _next_item(frame):
    """Return the next item of a container, of a dictionary the next key or value, and go on."""
    thing, container, place = load(frame + _THING), load(frame + _CONTAINER), load(frame + _PLACE)
    store(frame + _PLACE, place + 1)
    if container != DICT:
        return item_of(container, thing, place)
    if place & 1:
        return load(frame + _VALUE)
    dict_next(thing, frame + _POSITION, frame + _KEY, frame + _VALUE)
    return load(frame + _KEY)


@linked("int64", "int64", "int64", "int64", "int64")
def _put_array(words, at, end, array):
    """Write an array; return the address after it, 0 if it has no place."""
    table = get(words, TABLE)
    description = describe_array(words, array) if is_plain(table, array, WRITABLE) else 0
    nbytes, in_shape = array_nbytes(words, array, description), shape_nbytes(description)
    if description == 0 or nbytes > end - at - in_shape - 24:
        return 0
    store(at, ARRAY | nbytes << NUMBER_BIT)
    store(at + 8, description)
    copy(at + 16, shape_of(words, array), in_shape)
    copy(at + 16 + in_shape, data_of(table, array), nbytes)
    return at + 16 + in_shape + padded(nbytes)


@linked("int64", "int64", "int64", "int64", "int64", "int64")
def _put_scalar_of_numpy(words, at, end, thing, kind):
    """Write a scalar of NumPy of this type; return the address after it, 0 if it is none or has no place."""
    description = describe_scalar(words, kind)
    nbytes = itemsize_at(words, dtype_in(description)) if description else 0
    if description == 0 or nbytes > end - at - 24:
        return 0
    store(at, SCALAR | nbytes << NUMBER_BIT)
    store(at + 8, description)
    copy(at + 16, thing + get(get(words, TABLE), HEADER), nbytes)
    return at + 16 + padded(nbytes)


@helper
def _put_leaf(words, at, end, item, is_array):
    """Write what is no container; return the address after it, 0 if it has no place."""
    if is_array:
        return _put_array(words, at, end, item)
    # The type is read first: for a text that cannot be encoded `put_item` makes an exception, which may run code of the
    # program in a collection of garbage, and the item may be gone then.
    kind = type_of(words, item)
    after = put_item(words, at, end, item)
    return after if after else _put_scalar_of_numpy(words, at, end, item, kind)


@linked("int64", "int64", "int64", "int64", "int64")
def put_items(words, thing, target, room):
    """Write a container; return its bytes, 0 if there are more than `room` or an item has to be pickled."""
    at, end, depth, seen, item = target, target + room, 0, 0, thing
    array_type = get(get(words, TABLE), ARRAY_TYPE)
    while True:
        container, is_array = container_of(words, item), type_of(words, item) == array_type
        if container in (LIST, DICT) or is_array:
            if not _is_new(words, item, seen):
                return 0
            seen += 1
        if container >= 0:
            size = size_of(container, item)
            if depth == MAX_DEPTH or size > end - at - 8 >> 3:
                return 0
            store(at, container | size << NUMBER_BIT)
            _push(words, depth, item, container, size)
            at, depth = at + 8, depth + 1
        else:
            at = _put_leaf(words, at, end, item, is_array)
            if at == 0:
                return 0
        frame = _frame_at(words, depth - 1)
        while load(frame + _PLACE) == load(frame + _SIZE):
            depth -= 1
            if depth == 0:
                return at - target
            frame = _frame_at(words, depth - 1)
        item = _next_item(frame)


# Reading --------------------------------------------------------------------------------------------------------------


@helper
def _new_container(container, size):
    if container == DICT:
        return dict_object()
    return list_object(size) if container == LIST else tuple_object(size)


@linked("int64", "int64", "int64", "int64")
def _get_numpy(words, at, end):
    """Return a new array or scalar of NumPy; 0 with an exception set if it cannot be read."""
    kind, nbytes = load(at) & 0xFF, load(at) >> NUMBER_BIT
    if end - at < 16:
        return corrupt(words)
    description = load(at + 8)
    in_shape = shape_nbytes(description)
    known = kind_of(description) == kind and 0 <= nbytes <= end - at - 16 - in_shape
    if (
        not known
        or (kind == SCALAR and in_shape)
        or is_known_array(words, at, description & ~(0xF << KIND_BIT), nbytes) == 0
    ):
        return corrupt(words)
    if kind == SCALAR:
        return get_scalar_of_numpy(words, description, at + 16)
    return get_array(words, at, description, at + 16 + in_shape, nbytes)


@helper
def _get_leaf(words, at, end):
    kind = load(at) & 0xFF
    return _get_numpy(words, at, end) if kind in (ARRAY, SCALAR) else get_item(words, at, end)


@helper
def _after_leaf(at):
    """Return the address after an item that has been read and is no container."""
    kind, nbytes = load(at) & 0xFF, load(at) >> NUMBER_BIT
    if kind in (ARRAY, SCALAR):
        at += 8 + shape_nbytes(load(at + 8))
    return at + 8 + padded(nbytes)


@helper
def _attach(frame, item):
    """Set the next item of a container, or keep it as the next key; return 0, or -1 with an exception set."""
    thing, container, place = load(frame + _THING), load(frame + _CONTAINER), load(frame + _PLACE)
    store(frame + _PLACE, place + 1)
    if container == LIST:
        return set_item(thing, place, item)
    if container == TUPLE:
        return set_tuple_item(thing, place, item)
    if place & 1 == 0:
        store(frame + _KEY, item)
        return 0
    key = load(frame + _KEY)
    store(frame + _KEY, 0)
    status = set_dict_item(thing, key, item)
    drop(key)
    drop(item)
    return status


@helper
def _forget(words, depth):
    """Give up the containers that are being made; return 0."""
    for level in range(depth):
        frame = _frame_at(words, level)
        drop(load(frame + _THING))
        if load(frame + _KEY):
            drop(load(frame + _KEY))
    return 0


@helper
def _opened(words, at, end, depth):
    """Return a new container, 0 with an exception set if it cannot be read."""
    container, size = load(at) & 0xFF, load(at) >> NUMBER_BIT
    if container > DICT or depth == MAX_DEPTH or not 0 <= size <= end - at - 8 >> 3:
        return corrupt(words)
    made = _new_container(container, size)
    if made:
        _push(words, depth, made, container, size)
    return made


@linked("int64", "int64", "int64", "int64")
def get_items(words, data, nbytes):
    """Return a new container from its bytes; 0 with an exception set if it cannot be read."""
    at, end, depth = data, data + nbytes, 0
    while True:
        if end - at < 8 or (depth == 0 and load(at) & 0xFF < LIST):
            corrupt(words)
            return _forget(words, depth)
        if load(at) & 0xFF >= LIST:
            if _opened(words, at, end, depth) == 0:
                return _forget(words, depth)
            at, depth = at + 8, depth + 1
        else:
            item = _get_leaf(words, at, end)
            if item == 0 or _attach(_frame_at(words, depth - 1), item) != 0:
                return _forget(words, depth)
            at = _after_leaf(at)
        frame = _frame_at(words, depth - 1)
        while load(frame + _PLACE) == load(frame + _SIZE):
            made, depth = load(frame + _THING), depth - 1
            if depth == 0:
                return made
            frame = _frame_at(words, depth - 1)
            if _attach(frame, made) != 0:
                return _forget(words, depth)
