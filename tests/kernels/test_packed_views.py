"""What compiled code reads of derived datatypes, beside what Python reads of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from mpicoll import Intracomm
from mpicoll.buffers import known_types
from mpicoll.buffers.flat_buffer import view_at
from mpicoll.buffers.plain_specs import Apart, array_of
from mpicoll.buffers.typemap import typemap_of
from mpicoll.kernels import dispatch_table, packed_views, strided_copy
from mpicoll.kernels.decorators import DISABLED, uncached_kernel
from mpicoll.kernels.operation_words import DONE
from mpicoll.kernels.reduce import DTYPES
from mpicoll.shared_memory.fast_dispatch import FastDispatch
from tests import layouts

pytestmark = pytest.mark.skipif(DISABLED, reason="there is no machine code without a JIT")


@uncached_kernel
def read(table: int, thing: int, place: int, blocks: int, reduces: int, is_read: bool, out: np.ndarray) -> bool:
    if not packed_views.begin_packed(table):
        return False
    found = packed_views.packed_in(table, thing, place, blocks, reduces, is_read)
    if found == thing:
        return False
    out[0], out[1] = dispatch_table.data_of(table, found), dispatch_table.count_of(table, found)
    out[2] = dispatch_table.number_of_dtype(table, found)
    out[3] = dispatch_table.is_plain(table, found, dispatch_table.WRITABLE)
    return True


@uncached_kernel
def unpack(table: int) -> None:
    packed_views.end_packed(table, DONE)


@pytest.fixture
def dispatch() -> Iterator[FastDispatch]:
    comm = Intracomm(MPI.COMM_SELF.Dup())
    made = comm._scope.channel.dispatch
    made.begin_packing(by_messages=True)
    yield made
    comm.Free()


def packed(
    dispatch: FastDispatch, spec: Any, place: int = 1, blocks: int = 1, moved: bool = True, is_read: bool = True
) -> Any:
    """Return the elements that compiled code sees, in its memory; None if it leaves the specification to Python."""
    out = np.zeros(4, np.int64)
    dispatch.forget_packed()
    if not read(dispatch.address, id(spec), place, blocks, int(not moved), is_read, out):
        return None
    found = view_at(int(out[0]), int(out[1]) * DTYPES[out[2]].itemsize, np.dtype(np.uint8)).view(DTYPES[out[2]])
    found.flags.writeable = bool(out[3])
    return found


def as_python_reads(spec: Any, blocks: int = 1, moved: bool = True) -> np.ndarray:
    found = array_of(spec, blocks, sent=True, moved=moved)
    return (found.packed() if isinstance(found, Apart) else found).flatten()


@pytest.mark.parametrize("seed", range(6))
def test_random_layouts_are_packed_and_unpacked_as_python_does(dispatch: FastDispatch, seed: int) -> None:
    numbers, seen = random.Random(seed), 0
    for _ in range(60):
        dtype, each, entries = np.dtype(numbers.choice(("f8", "i4", "u2", "i1"))), numbers.randrange(1, 30), 4
        layout = layouts.draw(numbers, dtype, each)
        scattered = layouts.Scattered(layout, each * entries, dtype)
        scattered.values = np.arange(each * entries) % 100
        blocks = numbers.choice((1, 2, 4))
        spec = scattered.spec(blocks)
        if array_of(spec, blocks) is not NotImplemented:
            wanted = as_python_reads(spec, blocks)
            found = packed(dispatch, spec, blocks=blocks)
            if found is not None:  # unless a row of the table was needed for another datatype
                seen += 1
                assert found.dtype == wanted.dtype
                np.testing.assert_array_equal(found, wanted)
                found[...] = wanted[::-1]
                unpack(dispatch.address)
                np.testing.assert_array_equal(scattered.values, wanted[::-1].view(dtype))
        assert scattered.is_intact()
        layout.datatype.Free()
    assert seen > 20


def test_a_freed_datatype_is_forgotten_before_its_handle_is_used_again(dispatch: FastDispatch) -> None:
    array, handles = np.arange(24.0), list[int]()
    for step in (2, 3, 4, 5, 6):
        column = MPI.DOUBLE.Create_vector(4, 1, step).Commit()
        handles.append(column.handle)
        spec = [array, 1, column]
        assert packed(dispatch, spec) is None  # not seen before
        as_python_reads(spec)
        np.testing.assert_array_equal(packed(dispatch, spec), array[: 4 * step : step])
        column.Free()
    if MPI.Get_library_version().startswith("MPICH"):
        assert len(set(handles)) < len(handles)


def test_more_datatypes_than_the_table_has_rows(dispatch: FastDispatch) -> None:
    array = np.arange(2000.0)
    columns = [MPI.DOUBLE.Create_vector(3, 1, step).Commit() for step in range(2, 202)]
    for _ in range(2):
        for step, column in enumerate(columns, 2):
            spec = [array, 1, column]
            as_python_reads(spec)
            np.testing.assert_array_equal(packed(dispatch, spec), array[: 3 * step : step])
    for column in columns:
        column.Free()


def test_entries_without_gaps_are_not_copied(dispatch: FastDispatch) -> None:
    array, pair = np.arange(5000.0), MPI.DOUBLE.Create_contiguous(2).Commit()
    as_python_reads([array, 3, pair])
    for spec, count in (([array, 3, pair], 6), ([array, pair], 5000), ((array, 2500, pair), 5000)):
        found = packed(dispatch, spec)
        assert found.ctypes.data == array.ctypes.data
        assert found.size == count
    pair.Free()


def test_what_does_not_fit_or_is_too_long_is_left_to_python(dispatch: FastDispatch) -> None:
    array, column = np.arange(40.0), MPI.DOUBLE.Create_vector(4, 1, 3).Commit()
    long = MPI.DOUBLE.Create_vector(1025, 1, 2).Commit()
    as_python_reads([array, 1, column])
    as_python_reads([np.zeros(2050), 1, long])
    assert packed(dispatch, [array, 4, column]) is not None
    for spec in (
        [array, 5, column],
        [array, -1, column],
        [array, 0, column],
        [array, 1 << 40, column],
        [array[:39], column],  # no whole number of entries of 10 elements
        [array[:9], 1, column],
        [array[::2], 1, column],
        [array.astype(object), 1, column],
        [array, 1, 1, column],
        [None, 1, column],
        [array, 1, MPI.DATATYPE_NULL],
        [array, 1, "column"],
        [np.zeros(2050), 1, long],
    ):
        assert packed(dispatch, spec) is None, spec
    column.Free()
    long.Free()


def test_read_only_memory_stays_read_only(dispatch: FastDispatch) -> None:
    array, column = np.arange(40.0), MPI.DOUBLE.Create_vector(4, 1, 3).Commit()
    as_python_reads([array, 1, column])
    array.flags.writeable = False
    assert not packed(dispatch, [array, 1, column]).flags.writeable
    column.Free()


def test_elements_of_several_types_are_moved_as_bytes_and_not_reduced(dispatch: FastDispatch) -> None:
    array = np.arange(32, dtype=np.uint8)
    mixed = MPI.Datatype.Create_struct([1, 1], [0, 8], [MPI.INT, MPI.FLOAT]).Commit()
    as_python_reads([array, 2, mixed])
    found = packed(dispatch, [array, 2, mixed])
    np.testing.assert_array_equal(found, [*range(4), *range(8, 16), *range(20, 24)])
    assert packed(dispatch, [array, 2, mixed], moved=False) is None
    mixed.Free()


def test_what_is_forgotten_or_only_read_is_not_unpacked(dispatch: FastDispatch) -> None:
    array, column = np.zeros(12), MPI.DOUBLE.Create_vector(4, 1, 3).Commit()
    as_python_reads([array, 1, column])
    packed(dispatch, [array, 1, column])[...] = 7
    dispatch.forget_packed()
    dispatch._unpack()
    assert not array.any()
    packed(dispatch, [array, 1, column], place=0)[...] = 7
    unpack(dispatch.address)
    assert not array.any()
    packed(dispatch, [array, 1, column])[...] = 7
    dispatch._unpack()
    assert array.sum() == 28
    column.Free()


def test_a_call_inside_another_one_does_not_use_its_copies(dispatch: FastDispatch) -> None:
    array, column, out = np.zeros(12), MPI.DOUBLE.Create_vector(4, 1, 3).Commit(), np.zeros(4, np.int64)
    as_python_reads([array, 1, column])
    packed(dispatch, [array, 1, column])[...] = 7
    assert not read(dispatch.address, id([array, 1, column]), 1, 1, 0, True, out)
    unpack(dispatch.address)
    assert array.sum() == 28
    assert packed(dispatch, [array, 1, column]) is not None
    column.Free()


def test_entries_whose_bytes_could_overflow_are_left_to_python(dispatch: FastDispatch) -> None:
    array, inner = np.zeros(4), MPI.DOUBLE.Create_hvector(1 << 30, 1, 0)
    many = inner.Create_resized(0, 0).Commit()
    known_types.note(many, typemap_of(many))
    assert packed(dispatch, [array, 1 << 30, many]) is None
    inner.Free()
    many.Free()


class Rows(np.ndarray):
    """Rows of known types; `meanwhile` is called before one is written, as another thread or a signal handler may."""

    meanwhile: Callable[[], None] | None = None

    def __setitem__(self, where: Any, value: Any) -> None:
        call, Rows.meanwhile = (Rows.meanwhile, None) if isinstance(value, list) else (None, Rows.meanwhile)
        if call is not None:
            call()
        super().__setitem__(where, value)


def test_a_datatype_that_two_threads_enter_at_once_is_gone_when_it_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    column, other = MPI.DOUBLE.Create_vector(4, 1, 3).Commit(), MPI.DOUBLE.Create_vector(4, 1, 4).Commit()
    word, rows = known_types.handle_word(column), known_types._rows.view(Rows)

    def found() -> int:
        entered = rows[:, packed_views.TYPE_LAYOUT + strided_copy.NBYTES] != 0
        return int(np.sum(entered & (rows[:, packed_views.HANDLE] == word)))

    def enter(datatype: MPI.Datatype) -> None:
        known_types.note(datatype, typemap_of(datatype))

    def enter_both() -> None:
        enter(other)  # in the row that the first thread has chosen
        enter(column)

    monkeypatch.setattr(known_types, "_rows", rows)
    monkeypatch.setattr(known_types, "_left", 9)
    monkeypatch.setattr(packed_views, "type_entry", lambda handle: 0)
    monkeypatch.setattr(Rows, "meanwhile", enter_both)
    rows[:2] = 0
    enter(column)
    assert Rows.meanwhile is None
    assert found() == 1
    column.Free()
    assert found() == 0
    other.Free()


def test_handles_are_read_as_compiled_code_reads_them() -> None:
    for datatype in (MPI.INT, MPI.DOUBLE):
        nbytes = MPI._sizeof(MPI.Datatype)
        memory = view_at(MPI._addressof(datatype), nbytes, np.dtype(f"i{nbytes}"))
        assert known_types.handle_word(datatype) == memory[0]
