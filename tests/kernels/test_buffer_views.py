"""What compiled code reads of buffers and their specifications, beside what Python reads of them."""

from __future__ import annotations

import array
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from mpicoll import Intracomm
from mpicoll.buffers.plain_specs import array_of
from mpicoll.kernels import buffer_views, dispatch_table
from mpicoll.kernels.decorators import DISABLED, uncached_kernel
from mpicoll.kernels.reduce import DTYPES

pytestmark = pytest.mark.skipif(DISABLED, reason="there is no machine code without a JIT")

ARRAY = np.arange(12.0)
READ_ONLY = ARRAY.copy()
READ_ONLY.flags.writeable = False


@uncached_kernel
def read(table: int, thing: int, place: int, blocks: int, may_move: bool, out: np.ndarray) -> bool:
    found = buffer_views.array_in(table, thing, place, blocks, may_move)
    if not dispatch_table.is_plain(table, found, dispatch_table.READABLE):
        return False
    out[0], out[1] = dispatch_table.data_of(table, found), dispatch_table.count_of(table, found)
    out[2] = dispatch_table.number_of_dtype(table, found)
    out[3] = dispatch_table.is_plain(table, found, dispatch_table.WRITABLE)
    return True


@pytest.fixture(scope="module")
def table() -> int:
    address: int = Intracomm(MPI.COMM_SELF)._scope.channel.dispatch.address
    return address


def seen(table: int, thing: Any, place: int = 0, blocks: int = 1, may_move: bool = True) -> list[int] | None:
    """Return address, length, element type and 1 for writable, as compiled code sees them; None if it sees no array."""
    out = np.zeros(4, np.int64)
    return out.tolist() if read(table, id(thing), place, blocks, may_move, out) else None


def expected(thing: Any, blocks: int = 1) -> list[int] | None:
    """Return the same as Python sees it; None if it sees something else."""
    found = array_of(thing, blocks, sent=True)
    if type(found) is not np.ndarray or found.dtype not in DTYPES:
        return None
    is_scalar = isinstance(thing[0] if type(thing) in (list, tuple) else thing, np.generic)
    return [found.ctypes.data, found.size, DTYPES.index(found.dtype), found.flags.writeable and not is_scalar]


SPECS: dict[str, Callable[[], Any]] = {
    "array": lambda: ARRAY,
    "matrix": lambda: ARRAY.reshape(3, 4),
    "list, type": lambda: [ARRAY, MPI.DOUBLE],
    "tuple, type": lambda: (ARRAY, MPI.DOUBLE),
    "list, letter": lambda: [ARRAY, "d"],
    "a letter that was computed": lambda: [ARRAY, chr(ord("d"))],
    "count": lambda: [ARRAY, 5],
    "count in a tuple": lambda: (ARRAY, 12),
    "no elements": lambda: [ARRAY, 0, MPI.DOUBLE],
    "count, type": lambda: [ARRAY, 7, MPI.DOUBLE],
    "count, letter": lambda: (ARRAY, 7, "d"),
    "matrix, count": lambda: [ARRAY.reshape(3, 4), 5],
    "read-only": lambda: [READ_ONLY, 4, MPI.DOUBLE],
    "array.array": lambda: array.array("i", [1, 2, 3]),
    "array.array of floats": lambda: [array.array("f", [1, 2, 3]), 2, MPI.FLOAT],
    "empty array.array": lambda: array.array("d"),
    "bytearray": lambda: bytearray(b"abc"),
    "empty bytearray": bytearray,
    "bytes": lambda: b"abcdef",
    "bytes, count": lambda: [b"abcdef", 3, MPI.BYTE],
}


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("place", [0, 1])
def test_common_forms_are_read_as_python_reads_them(table: int, name: str, place: int) -> None:
    thing = SPECS[name]()
    wanted = expected(thing)
    assert wanted is not None
    found = seen(table, thing, place)
    assert found is not None
    assert found[1:] == wanted[1:]
    assert found[0] == wanted[0] or found[1] == 0  # NumPy sees no elements anywhere


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scalars_are_read_only_and_where_their_value_is(table: int, dtype: np.dtype) -> None:
    scalar = dtype.type(1)
    found = seen(table, scalar)
    assert found is not None
    assert found[1:] == [1, DTYPES.index(dtype), 0]
    memory = np.frombuffer((np.ctypeslib.ctypes.c_char * dtype.itemsize).from_address(found[0]), np.uint8)
    assert memory.tobytes() == scalar.tobytes()
    specified = seen(table, [scalar, 1])
    assert specified is not None
    assert specified[1:] == found[1:]


OTHERS: dict[str, Any] = {
    "None": None,
    "in place": MPI.IN_PLACE,
    "number": 3.0,
    "text": "abc",
    "gaps": ARRAY[::2],
    "another type": [ARRAY, MPI.INT],
    "another letter": [ARRAY, "f"],
    "a word": [ARRAY, "double"],
    "too many": [ARRAY, 13],
    "very many": [ARRAY, 1 << 47, MPI.DOUBLE],
    "more than fit into a word": [ARRAY, 1 << 80, MPI.DOUBLE],
    "negative": [ARRAY, -1, MPI.DOUBLE],
    "a float": [ARRAY, 3.0, MPI.DOUBLE],
    "a truth value": [ARRAY, True, MPI.DOUBLE],
    "a count of NumPy": [ARRAY, np.int64(3), MPI.DOUBLE],
    "a pair": [ARRAY, (3, 2), MPI.DOUBLE],
    "displacement": [ARRAY, 3, 2, MPI.DOUBLE],
    "no count": [ARRAY, None, MPI.DOUBLE],
    "gaps, count": [ARRAY[::2], 3, MPI.DOUBLE],
    "Fortran's order, count": [np.zeros((3, 4), order="F"), 5, MPI.DOUBLE],
    "nothing": [],
    "one": [ARRAY],
    "lists": [[ARRAY, 3], [ARRAY, 3]],
    "text in an array.array": array.array("u", "abc"),
    "an unknown type": np.zeros(3, "M8[s]"),
    "big-endian": [np.zeros(3, ">f8"), 2],
    "an object": object(),
    "a subclass": type("Sub", (np.ndarray,), {})((3,)),
    "a subclass of bytearray": type("Sub", (bytearray,), {})(b"abc"),
    "memoryview": memoryview(ARRAY),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_forms_are_left_to_python(table: int, name: str) -> None:
    found = seen(table, OTHERS[name])
    assert found is None or found[2] < 0


def test_buffers_that_can_be_resized_are_not_read_for_nonblocking_calls(table: int) -> None:
    for thing in (bytearray(b"abc"), array.array("d", [1.0]), [bytearray(b"abc"), 2, MPI.BYTE]):
        assert seen(table, thing) is not None
        assert seen(table, thing, may_move=False) is None
    assert seen(table, np.float64(3), may_move=False) is not None


def test_both_views_hold_at_the_same_time(table: int) -> None:
    first, second = np.zeros(4, np.int64), np.zeros(4, np.int64)
    one, other = [ARRAY, 3, MPI.DOUBLE], np.float32(2)
    assert read(table, id(one), 0, 1, True, first)
    assert read(table, id(other), 1, 1, True, second)
    assert first[:2].tolist() == [ARRAY.ctypes.data, 3]
    assert second[1:3].tolist() == [1, DTYPES.index(np.dtype(np.float32))]


def test_random_specifications(table: int) -> None:
    """What is seen as an array is what Python sees."""
    numbers = random.Random(7)
    dtypes = np.float64, np.int32, np.uint8, np.complex128, ">i4", "M8[s]"
    arrays = [np.zeros(length, dtype) for length in (0, 1, 7, 24) for dtype in dtypes]
    arrays += [np.zeros((4, 6)), np.zeros((4, 6))[:, ::2], READ_ONLY, np.array(3.0)]
    things = [*arrays, np.float64(1), np.int32(5), bytearray(24), bytes(24), array.array("d", range(24)), None, 5]
    counts = [0, 1, 2, 3, 6, 7, 8, 24, 25, -1, 1 << 50, None, True, 2.0, (2, 1), np.int64(2), [1]]
    types = [MPI.DOUBLE, MPI.INT, MPI.BYTE, MPI.INT32_T, MPI.UNSIGNED_CHAR, "d", "i", "B", "x", None]
    common = 0
    for _ in range(20_000):
        spec: list[Any] = [numbers.choice(things)]
        if numbers.random() < 0.7:
            spec.append(numbers.choice(counts))
        if numbers.random() < 0.8:
            spec.append(numbers.choice(types))
        thing = numbers.choice((list, tuple))(spec)
        blocks = numbers.choice((1, 2, 3))
        found = seen(table, thing, numbers.randrange(2), blocks)
        if found is None or found[2] < 0:
            continue
        wanted, common = expected(thing, blocks), common + 1
        assert wanted is not None, thing
        assert found[1:] == wanted[1:], thing
        assert found[1] == 0 or found[0] == wanted[0] or np.isscalar(thing[0]), thing
    assert common > 1_000
