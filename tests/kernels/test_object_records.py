"""Records that compiled code writes and reads."""

from __future__ import annotations

import contextlib
import gc
import pickle
import sys
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mpi4py import MPI

from mpicoll import Intracomm
from mpicoll.errors import CorruptPayload
from mpicoll.kernels import object_calls
from mpicoll.kernels.atomics import load
from mpicoll.kernels.decorators import DISABLED
from mpicoll.kernels.object_calls import ended
from mpicoll.kernels.object_kernels import int_at, object_at, object_kernel
from mpicoll.kernels.object_parts import known_room
from mpicoll.kernels.object_records import description_of, get_here, is_known, put_object
from mpicoll.kernels.object_reductions import reduced_types
from mpicoll.kernels.object_words import (
    ASIDE,
    DTYPE_COUNT,
    FAILED,
    HEAD_NBYTES,
    ITEMS,
    LONG_ROOM,
    LONG_SOMEWHERE,
    MAX_DEPTH,
    MAX_SEEN,
    OTHER,
    OWN_DATA,
    PICKLE,
    ROOM,
    SPACE_USED,
    is_apart,
)
from mpicoll.kernels.operation_words import get
from mpicoll.kernels.operation_words import put as put_word
from mpicoll.kernels.python_interface import int_object, keep
from mpicoll.objects import encoding, exchange, records
from mpicoll.objects.compiled_records import ASIDE as LEFT
from mpicoll.objects.compiled_records import CompiledRecords, known_layout
from tests.objects import Vector, differ, samples

pytestmark = pytest.mark.skipif(DISABLED, reason="nothing is compiled")
CALL = records.call_word("allreduce", 3, 7)
SCALARS = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.complex_numbers(), st.binary(), st.text())
OBJECTS = st.recursive(SCALARS, lambda each: st.lists(each, max_size=4) | st.dictionaries(st.text(), each))


@object_kernel
def put(module, arguments, count):  # type: ignore[no-untyped-def]
    """Write a record of an object; return its bytes or what stands in their place."""
    words = int_at(arguments, 0)
    memory, call = get(words, OWN_DATA), int_at(arguments, 1)
    nbytes = put_object(words, memory, call, object_at(arguments, 2), 0)
    if nbytes > 0 and is_apart(description_of(memory, call), nbytes):
        nbytes = OTHER
    ended(words, 0)
    put_word(words, SPACE_USED, 0)
    return 0 if nbytes == FAILED else int_object(nbytes)


@object_kernel
def take(module, arguments, count):  # type: ignore[no-untyped-def]
    """Read the record; return the object, or what stands for one that Python has to read."""
    words, call = int_at(arguments, 0), int_at(arguments, 1)
    memory = get(words, OWN_DATA)
    if is_known(words, memory, call, int_at(arguments, 2)) and load(memory + 8) <= ROOM:
        return get_here(words, memory, call)
    left = get(words, ASIDE)
    keep(left)
    return left


@pytest.fixture(scope="module")
def memory() -> CompiledRecords:
    comm = Intracomm(MPI.COMM_SELF)
    comm.Allreduce(np.ones(1), np.ones(1))
    made = CompiledRecords(0, 1, comm._table)
    made.comm = comm  # type: ignore[attr-defined]  # it has the table
    return made


def travelled(memory: CompiledRecords, obj: Any) -> Any:
    """Return the object after its way through a record; LEFT if that is Python's task."""
    nbytes = put.run(memory.address, CALL, obj)
    if nbytes < 0:
        memory.release()
        return LEFT
    found = records.read(memory.own.tobytes(), 0)
    assert found.call == CALL
    assert found.nbytes == nbytes
    assert found.data is not None
    in_python = encoding.decode(found.kind, found.dtype, found.flags, found.shape, found.data)
    assert differ(in_python, pickle.loads(pickle.dumps(obj))) == ""
    return take.run(memory.address, CALL, 0)


@given(obj=OBJECTS)
def test_objects_come_back_as_from_mpi4py(memory: CompiledRecords, obj: Any) -> None:
    result = travelled(memory, obj)
    if result is not LEFT:
        assert differ(result, MPI.pickle.loads(MPI.pickle.dumps(obj))) == ""


@pytest.mark.parametrize("number", range(len(samples())))
def test_samples_come_back_as_from_mpi4py(memory: CompiledRecords, number: int) -> None:
    obj = samples()[number]
    result = travelled(memory, obj)
    if result is not LEFT:
        assert differ(result, MPI.pickle.loads(MPI.pickle.dumps(obj))) == ""


@given(obj=OBJECTS)
def test_records_of_the_general_way_are_read(memory: CompiledRecords, obj: Any) -> None:
    payload = encoding.encode(obj)
    records.write(memory.own.data, 0, CALL, payload)
    result = take.run(memory.address, CALL, 0)
    assert result is LEFT if records.is_long(payload) else differ(result, obj) == ""


@pytest.mark.parametrize("number", range(len(samples())))
def test_samples_of_the_general_way_are_read(memory: CompiledRecords, number: int) -> None:
    obj = samples()[number]
    payload = encoding.encode(obj)
    if not records.is_long(payload):
        records.write(memory.own.data, 0, CALL, payload)
        result = take.run(memory.address, CALL, 0)
        assert result is LEFT or differ(result, MPI.pickle.loads(MPI.pickle.dumps(obj))) == ""


def test_which_objects_are_taken(memory: CompiledRecords) -> None:
    taken = [
        1,
        -1,
        2**63 - 1,
        -(2**63),
        0.5,
        float("nan"),
        1j,
        None,
        True,
        False,
        b"",
        "",
        "é" * 200,
        b"x" * 488,
        (),
        {},
    ]
    taken += [{"a": [1, 2.5], "b": {"c": None}}, [(1, 2), (3, "x")], list(range(30)), {1: "x", (2, 3): b"y"}]
    taken += [np.float64(1), np.zeros(2), np.ones((3, 4), np.float32), np.array(1), np.zeros((2, 0)), [2**64]]
    taken += [[[[[1]]]], {"a": np.zeros(3)}, object, {1}, Ellipsis, [list(range(25))]]
    for obj in taken:
        assert travelled(memory, obj) is not LEFT, obj
    left: list[Any] = [2**63, -(2**63) - 1, "\udc80", "x" * 489, "é" * 245, b"x" * 489, list(range(33))]
    left += [[list(range(300))], np.zeros(61), np.zeros(9)[::2], {"weights": np.arange(70_000.0)}]
    for obj in left:
        assert travelled(memory, obj) is LEFT, obj


@object_kernel
def room(module, arguments, count):  # type: ignore[no-untyped-def]
    """Return what `known_room` does for the record."""
    words = int_at(arguments, 0)
    return int_object(known_room(words, get(words, OWN_DATA), int_at(arguments, 1)))


def test_objects_are_no_longer_than_the_room_that_is_announced_for_them(memory: CompiledRecords) -> None:
    for nbytes, exponent, expected in (
        (600, 10, 1024),
        (1024, 10, 1024),
        (1025, 10, -1),
        (LONG_ROOM, 15, -1),
        (LONG_ROOM, 16, LONG_ROOM),
        (600, 17, -1),
        (600, 0, -1),
        (5, 10, 1024),
    ):
        memory.own[:] = 0
        records.write(memory.own.data, 0, CALL, encoding.encode(b"x" * nbytes), LONG_SOMEWHERE, exponent)
        assert room.run(memory.address, CALL) == expected, (nbytes, exponent)
    records.write(memory.own.data, 0, CALL, encoding.encode(b"x" * 600))
    assert room.run(memory.address, CALL) == -1
    records.write(memory.own.data, 0, CALL, encoding.encode(b"x" * 6))
    assert room.run(memory.address, CALL) == 0


def test_element_types_have_the_numbers_of_compiled_code() -> None:
    assert len(encoding.DTYPES) == DTYPE_COUNT
    for number, dtype in enumerate(encoding.DTYPES):
        assert (reduced_types(1) >> number & 1) == (dtype.char in "bBhHiIlLfdFD")
        assert (reduced_types(8) >> number & 1) == (dtype.char in "bBhHiIlL")
    assert reduced_types(0) == reduced_types(3) == reduced_types(11) == 0


def test_what_occurs_twice_is_one_object_after_it(memory: CompiledRecords) -> None:
    inner, table, array = [1], {"a": 1}, np.ones(2)
    for obj in ([inner, inner], {"a": table, "b": [table]}, (array, array), [(inner,), (inner,)]):
        assert put.run(memory.address, CALL, obj) > 0
        assert records.read(memory.own.tobytes(), 0).kind == PICKLE
    result = travelled(memory, [inner, inner])
    assert result[0] is result[1]
    several = [inner, [1], {}, {}, array, np.ones(2), (1,), (1,)]
    assert put.run(memory.address, CALL, several) > 0
    assert records.read(memory.own.tobytes(), 0).kind == ITEMS


def test_how_deep_and_how_many(memory: CompiledRecords) -> None:
    nested: Any = 1
    for depth in range(1, 12):
        nested = [nested] if depth % 3 else (nested, 2)
        assert put.run(memory.address, CALL, nested) > 0
        assert records.read(memory.own.tobytes(), 0).kind == (ITEMS if depth <= MAX_DEPTH else PICKLE)
        assert travelled(memory, nested) == nested
    for count in (20, MAX_SEEN - 1, MAX_SEEN):
        many: list[Any] = [[] for _ in range(count)]
        assert put.run(memory.address, CALL, many) > 0 or count > 60
        assert travelled(memory, many) == many or count > 60


class Key:
    """A key of a dictionary that cannot be pickled."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __reduce__(self) -> Any:
        raise self.error


def test_a_pickler_that_fails_is_left_to_python_and_an_interrupt_is_raised(memory: CompiledRecords) -> None:
    assert put.run(memory.address, CALL, {Key(ValueError("no")): 1}) < 0
    assert sys.exc_info() == (None, None, None)
    for error in (KeyboardInterrupt, SystemExit):
        with pytest.raises(error):
            put.run(memory.address, CALL, {Key(error()): 1})
    assert travelled(memory, {1: 2}) == {1: 2}


def test_what_cannot_be_unpickled_raises_its_exception(memory: CompiledRecords) -> None:
    assert put.run(memory.address, CALL, {1}) > 0
    memory.own[16:20] = 0xFF
    with pytest.raises(pickle.UnpicklingError):
        take.run(memory.address, CALL, 0)


def test_only_predictable_objects_if_wanted(memory: CompiledRecords) -> None:
    predictable = [1, "x", [1, 2], [1, [2]], {1: 2}, {(1, 2): 2}, np.ones(3)]
    for obj in [*predictable, {1, 2}, [{1}]]:
        assert put.run(memory.address, CALL, obj) >= 0
        assert (take.run(memory.address, CALL, 1) is not LEFT) == any(obj is each for each in predictable), obj


CONTAINERS: list[Any] = [
    [1, "ab", 2.5, None, 1j],
    ("xyz", b"", True),
    {"a": 1, "b": 2.0, 3: "c"},
    ["ü" * 40],
    [[], (1, [2, {"x": (3,)}]), {}, "end"],
    {"weights": np.arange(6.0).reshape(2, 3), "steps": [np.int8(3), np.zeros((0, 2), np.int16)], (1, "a"): np.array(7)},
    [np.longdouble(1.5), np.complex64(2j), np.True_, np.ones(3, np.float16)],
]


@pytest.mark.parametrize("obj", CONTAINERS)
def test_damaged_containers_are_refused(memory: CompiledRecords, obj: Any) -> None:
    """Whatever stands in the words of a container and its items, nothing outside of it is read, and no item is lost."""
    nbytes = put.run(memory.address, CALL, obj)
    intact = memory.own.copy()
    assert records.read(intact.tobytes(), 0).kind == ITEMS
    for place in range(HEAD_NBYTES, HEAD_NBYTES + nbytes, 8):
        for value in (0, 1, 2, 3, 7, 8, 255, -1, 1 << 9, 2 << 8, 3 | 8 << 8, 7 | 8 << 8, 7 | 1 << 40, 6 | -8 << 8):
            memory.own[:] = intact
            memory.own[place : place + 8].view(np.int64)[0] = value
            found = records.read(memory.own.tobytes(), 0)
            try:
                result = take.run(memory.address, CALL, 0)
            except (CorruptPayload, UnicodeDecodeError):
                with contextlib.suppress(CorruptPayload):
                    encoding.decode(found.kind, found.dtype, found.flags, found.shape, found.data)
            except TypeError:
                assert "{" in repr(obj)  # an item of a dictionary became its key, or the other way round
            else:
                in_python = encoding.decode(found.kind, found.dtype, found.flags, found.shape, found.data)
                assert differ(in_python, result) == ""


@pytest.mark.parametrize("place", [0, 3, 4, 5, 6, 7, 8, 9, 15])
def test_damaged_heads_are_left_to_python(memory: CompiledRecords, place: int) -> None:
    """Whatever they are, nothing outside of the record is read."""
    for value in range(256):
        assert put.run(memory.address, CALL, b"abc") == 3
        before = memory.own[:16].copy()
        memory.own[place] = value
        result = take.run(memory.address, CALL, 0) if place >= 8 else LEFT
        if place >= 8 and result is not LEFT:
            assert len(result) <= records.ROOM
            memory.own[:16] = before
    assert travelled(memory, b"abc") == b"abc"


def test_references_are_counted(memory: CompiledRecords) -> None:
    watched: list[Any] = [
        Vector([1, 2]),
        10**9,
        1.5,
        1j,
        "text of some length",
        b"bytes",
        None,
        True,
        ["x"],
        ("y", 1),
        {"z": [1, {}]},
    ]
    watched += [(each,) for each in watched]
    watched += [np.ones(3), np.dtype(np.float64), np.float32(2.5), {"key": b"value", 5: 2j}]
    for each in watched:
        travelled(memory, each)
    gc.collect()
    before, blocks = [sys.getrefcount(each) for each in watched], [sys.getallocatedblocks()]
    for _ in range(3):  # other threads of the process, and first calls, may allocate something once
        for _ in range(500):
            for each in watched:
                if put.run(memory.address, CALL, each) >= 0:
                    take.run(memory.address, CALL, 0)
        gc.collect()
        blocks.append(sys.getallocatedblocks())
    assert all(abs(sys.getrefcount(each) - count) < 50 for each, count in zip(watched, before, strict=True))
    assert min(after - earlier for earlier, after in pairwise(blocks)) < 200


def test_lengths_are_rounded_as_in_python() -> None:
    """Ranks that take the general way exchange as many bytes."""
    lengths = range(ROOM + 1, LONG_ROOM + 1)
    assert [object_calls.rounded(nbytes) for nbytes in lengths] == [exchange.rounded(nbytes) for nbytes in lengths]


def test_the_layout_of_numbers_is_known() -> None:
    assert known_layout()
