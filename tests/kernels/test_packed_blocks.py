"""Blocks of derived datatypes that compiled code packs and unpacks, beside what the layout of their entries says."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from mpicoll import Intracomm
from mpicoll.buffers.flat_buffer import view_at
from mpicoll.buffers.plain_specs import blocks_in
from mpicoll.kernels import dispatch_table, packed_blocks, packed_views
from mpicoll.kernels.decorators import DISABLED, uncached_kernel
from mpicoll.kernels.operation_words import DONE
from mpicoll.kernels.reduce import DTYPES
from mpicoll.shared_memory.fast_dispatch import FastDispatch
from tests import layouts

pytestmark = pytest.mark.skipif(DISABLED, reason="there is no machine code without a JIT")

SIZE, ENTRIES = 4, 9


@uncached_kernel
def read(table: int, thing: int, place: int, size: int, is_read: bool, numbers: np.ndarray, out: np.ndarray) -> bool:
    if not packed_views.begin_packed(table):
        return False
    found = packed_blocks.packed_blocks(table, thing, place, size, numbers.ctypes.data, is_read)
    if found == 0:
        return False
    out[0], out[1] = dispatch_table.data_of(table, found), dispatch_table.count_of(table, found)
    out[2] = dispatch_table.number_of_dtype(table, found)
    return True


@uncached_kernel
def unpack(table: int) -> None:
    packed_views.end_packed(table, DONE)


@pytest.fixture
def dispatch(monkeypatch: pytest.MonkeyPatch) -> Iterator[FastDispatch]:
    comm = Intracomm(MPI.COMM_SELF.Dup())
    made = comm._scope.channel.dispatch
    monkeypatch.setattr(made, "_size", SIZE)  # there is room for blocks of so many ranks
    made.begin_packing(by_messages=True)
    yield made
    comm.Free()


def packed(dispatch: FastDispatch, spec: Any, place: int = 1, is_read: bool = True) -> Any:
    """Return elements, counts and displacements that compiled code sees; None if it leaves the call to Python."""
    out, numbers = np.zeros(3, np.int64), np.full(2 * SIZE, -1)
    dispatch.forget_packed()
    if not read(dispatch.address, id(spec), place, SIZE, is_read, numbers, out):
        return None
    dtype = DTYPES[out[2]]
    found = view_at(int(out[0]), int(out[1]) * dtype.itemsize, np.dtype(np.uint8)).view(dtype)
    return found, numbers[:SIZE].tolist(), numbers[SIZE:].tolist()


def drawn_blocks(numbers: random.Random) -> tuple[list[int], list[int]]:
    """Draw blocks of some of the entries, in rank order, with gaps between some; an empty one may be anywhere."""
    cuts = sorted(numbers.randrange(ENTRIES + 1) for _ in range(2 * SIZE))
    counts = [end - begin for begin, end in zip(cuts[::2], cuts[1::2], strict=True)]
    return counts, [begin if count else numbers.randrange(50) for begin, count in zip(cuts[::2], counts, strict=True)]


def spec_of(scattered: layouts.Scattered, counts: Any, displs: Any, form: int) -> list[Any]:
    """Return a specification in one of the forms of mpi4py."""
    array, _, datatype = scattered.spec()
    if form == 0:
        return [array, (counts, displs), datatype]
    if form == 1:
        return [array, np.array(counts, np.intc), np.array(displs), datatype]
    return [array, tuple(counts), displs, datatype]


@pytest.mark.parametrize("seed", range(6))
def test_random_blocks_are_packed_and_unpacked(dispatch: FastDispatch, seed: int) -> None:
    numbers, seen = random.Random(seed), 0
    for turn in range(60):
        dtype, each = np.dtype(numbers.choice(("f8", "i4", "u2", "i1"))), numbers.randrange(1, 20)
        layout = layouts.draw(numbers, dtype, each)
        scattered = layouts.Scattered(layout, each * ENTRIES, dtype)
        values = np.arange(each * ENTRIES, dtype=dtype)
        scattered.values = values
        counts, displs = drawn_blocks(numbers)
        spec = spec_of(scattered, counts, displs, turn % 3)
        places = [slice(each * displ, each * (displ + count)) for count, displ in zip(counts, displs, strict=True)]
        if blocks_in(spec, SIZE) is not None and (found := packed(dispatch, spec)) is not None:
            seen += 1
            elements, their_counts, begins = found
            unit = dtype.itemsize // elements.itemsize
            assert their_counts == [each * count * unit for count in counts]
            assert begins == [sum(their_counts[:rank]) for rank in range(SIZE)]
            expected = [values[place] for place in places]
            np.testing.assert_array_equal(elements.view(dtype), np.concatenate(expected))
            elements.view(dtype)[...] = 7
            unpack(dispatch.address)
            for place in places:
                values[place] = 7
            np.testing.assert_array_equal(scattered.values, values)
        assert scattered.is_intact()
        layout.datatype.Free()
    assert seen > 20


@pytest.fixture
def column() -> Iterator[MPI.Datatype]:
    """A column of a matrix of 4 x 5 numbers."""
    whole = MPI.DOUBLE.Create_vector(4, 1, 5)
    made = whole.Create_resized(0, 8).Commit()
    whole.Free()
    yield made
    made.Free()


def test_blocks_in_any_order_are_sent_and_not_received(dispatch: FastDispatch, column: MPI.Datatype) -> None:
    matrix = np.arange(20.0).reshape(4, 5)
    spec = [matrix, [1, 2, 1, 0], [4, 0, 1, 99], column]
    assert packed(dispatch, spec, place=0) is None  # not seen before
    assert blocks_in(spec, SIZE) is not None
    elements, counts, _ = packed(dispatch, spec, place=0)
    np.testing.assert_array_equal(elements.reshape(4, 4).T, matrix[:, [4, 0, 1, 1]])
    assert counts == [4, 8, 4, 0]
    elements[...] = -1
    unpack(dispatch.address)
    assert matrix.min() == 0  # what is sent is not unpacked
    assert packed(dispatch, spec) is None


def test_a_result_that_is_not_read_is_not_packed(dispatch: FastDispatch, column: MPI.Datatype) -> None:
    matrix = np.ones((4, 5))
    spec = [matrix, [1, 1, 1, 2], column]
    assert blocks_in(spec, SIZE) is not None
    packed(dispatch, spec)[0][...] = 5
    elements, counts, begins = packed(dispatch, spec, is_read=False)
    assert (elements == 5).all()
    assert counts == [4, 4, 4, 8]
    assert begins == [0, 4, 8, 12]


def test_what_is_not_in_the_array_or_too_long_is_left_to_python(dispatch: FastDispatch, column: MPI.Datatype) -> None:
    matrix, long = np.zeros((4, 5)), MPI.DOUBLE.Create_vector(300, 1, 2).Commit()
    read_only = matrix.copy()
    read_only.flags.writeable = False
    for spec in ([matrix, [1, 1, 1, 1], column], [matrix, 1, column], [np.zeros(5000), [1, 1, 1, 0], long]):
        assert blocks_in(spec, SIZE) is not None
        assert packed(dispatch, spec) is not None
    for spec in (
        [matrix, [1, 1, 1, 1], [0, 1, 2, 5], column],
        [matrix, [1, 1, 1, 3], column],
        [matrix, [1, 1, 1, 1], [0, 1, 2, -1], column],
        [matrix, [1, 1, 1, -1], column],
        [matrix, [0, 0, 0, 0], column],
        [matrix, [1, 1, 1], column],
        [matrix, [1, 1, 1, 1], [0, 1, 2], column],
        [matrix, [1, 1, 1, 1 << 40], column],
        [matrix, [1, 1, 1, 1], [0, 1, 2, 1 << 60], column],
        [matrix, ([1, 1, 1, 1], None, 3), column],
        [matrix, None, column],
        [matrix, column],
        [matrix.T, [1, 1, 1, 1], column],
        [matrix, [1, 1, 1, 1], MPI.DOUBLE],
        [matrix, [1, 1, 1, 1], MPI.DATATYPE_NULL],
        [None, [1, 1, 1, 1], column],
        [read_only, [1, 1, 1, 1], column],
        [np.zeros(5000), [1, 1, 1, 1], long],
        None,
        3,
    ):
        assert packed(dispatch, spec) is None, spec
    assert packed(dispatch, [read_only, [1, 1, 1, 1], column], place=0) is not None
    long.Free()


def test_a_datatype_that_was_freed_is_unknown(dispatch: FastDispatch) -> None:
    array = np.arange(40.0)
    for step in (2, 3, 2, 4, 3):
        made = MPI.DOUBLE.Create_vector(2, 1, step).Commit()
        spec = [array, [1, 1, 1, 1], made]
        assert packed(dispatch, spec) is None
        assert blocks_in(spec, SIZE) is not None
        elements, _, _ = packed(dispatch, spec)
        begins = (step + 1) * np.arange(4)
        np.testing.assert_array_equal(elements, array[np.column_stack((begins, begins + step)).ravel()])
        made.Free()
