"""Specifications of vector collectives as compiled code reads them: as Python does, or not at all."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from mpicoll import Intracomm
from mpicoll.buffers.plain_specs import plain_blocks
from mpicoll.kernels import builtin_objects, dispatch_table, vector_specs
from mpicoll.kernels.decorators import DISABLED, uncached_kernel
from mpicoll.kernels.operation_words import ALLTOALL, GATHER, SCATTER
from mpicoll.kernels.reduce import DTYPES
from mpicoll.kernels.vector_checks import check_vectors, number_call
from mpicoll.progress.call_signature import Signature
from mpicoll.shared_memory.fast_dispatch import FastDispatch

pytestmark = pytest.mark.skipif(DISABLED, reason="addresses are for compiled code")
DATA = np.arange(2000.0)
EVEN = np.zeros(1998)
READ: dict[str, Any] = {
    "counts": [DATA, [3, 0, 4]],
    "counts and type": [DATA, [3, 0, 4], MPI.DOUBLE],
    "tuple": (DATA, [3, 0, 4], MPI.DOUBLE),
    "a letter": [DATA, [3, 0, 4], "d"],
    "displacements": [DATA, [3, 0, 4], [9, 1, 0], MPI.DOUBLE],
    "a tuple of each": [DATA, (3, 0, 4), (9, 1, 0), MPI.DOUBLE],
    "pair": [DATA, ([3, 0, 4], [9, 1, 0])],
    "pair and type": [DATA, ((3, 0, 4), (9, 1, 0)), MPI.DOUBLE],
    "pair without displacements": [DATA, ([3, 0, 4], None), MPI.DOUBLE],
    "no displacements": [DATA, [3, 0, 4], None, MPI.DOUBLE],
    "vectors": [DATA, np.array([3, 0, 4]), np.array([9, 1, 0], np.int32), MPI.DOUBLE],
    "pair of vectors": [DATA, (np.array([3, 0, 4]), np.array([9, 1, 0]))],
    "another type": [DATA.astype(np.int32), [1, 2, 3], MPI.INT],
    "matrix": [DATA.reshape(50, 40), [1, 2, 3], MPI.DOUBLE],
    "large counts": [DATA, [1 << 30, (1 << 30) - 1, (1 << 48) - 1], MPI.DOUBLE],
    "beyond the array": [DATA, [1999, 1999, 1999]],
    "one count": [DATA, 5, MPI.DOUBLE],
    "one count without type": [DATA, 0],
    "distance of blocks": [DATA, (5, 9)],
    "counts and a distance": [DATA, [3, 0, 4], 100, MPI.DOUBLE],
    "an array": EVEN,
    "array and type": [EVEN, MPI.DOUBLE],
}
LEFT: dict[str, Any] = {
    "an array that cannot be divided": DATA,
    "such an array and its type": [DATA, MPI.DOUBLE],
    "another type of an array": [EVEN, MPI.FLOAT],
    "a negative count": [DATA, -5, MPI.DOUBLE],
    "a negative distance": [DATA, (5, -9)],
    "too few counts": [DATA, [3, 4], MPI.DOUBLE],
    "too many counts": [DATA, [3, 4, 5, 6], MPI.DOUBLE],
    "negative": [DATA, [3, -1, 4], MPI.DOUBLE],
    "a negative element of a vector": [DATA, np.array([3, -1, 4]), MPI.DOUBLE],
    "very large": [DATA, [3, 1 << 60, 4], MPI.DOUBLE],
    "sums could overflow": [DATA, [3, 1 << 48, 4], MPI.DOUBLE],
    "sums could overflow, a vector": [DATA, np.array([3, 1 << 62, 4]), MPI.DOUBLE],
    "large displacements": [DATA, [3, 0, 4], [0, 0, 1 << 59], MPI.DOUBLE],
    "bool": [DATA, [3, True, 4], MPI.DOUBLE],
    "NumPy's ints": [DATA, [np.int64(3), 0, 4], MPI.DOUBLE],
    "floats": [DATA, [3.0, 0, 4], MPI.DOUBLE],
    "a vector of floats": [DATA, np.array([3.0, 0, 4]), MPI.DOUBLE],
    "a vector of bytes": [DATA, np.array([3, 0, 4], np.uint8), MPI.DOUBLE],
    "a strided vector": [DATA, np.array([3, 9, 0, 9, 4, 9])[::2], MPI.DOUBLE],
    "a matrix of counts": [DATA, np.array([[3, 0, 4]]), MPI.DOUBLE],
    "a wrong type": [DATA, [3, 0, 4], MPI.FLOAT],
    "a derived type": [DATA, [3, 0, 4], MPI.DOUBLE.Create_contiguous(1).Commit()],
    "no type": [DATA, [3, 0, 4], [9, 1, 0]],
    "a tuple of three": [DATA, (3, 0, 4), MPI.DOUBLE],
    "no counts": [DATA, None, MPI.DOUBLE],
    "nothing": [],
    "no items": (),
    "five items": [DATA, [3, 0, 4], [9, 1, 0], MPI.DOUBLE, 0],
    "a strided array": [DATA[::2], [3, 0, 4], MPI.DOUBLE],
    "swapped": [DATA.astype(">f8"), [3, 0, 4], MPI.DOUBLE],
    "bytes": [b"some bytes", [3, 0, 4], MPI.BYTE],
    "none": None,
    "in place": MPI.IN_PLACE,
}


@uncached_kernel
def read(table: int, spec: int, size: int, counts: int, displs: int) -> int:
    found: int = vector_specs.read_blocks(table, spec, size, counts, displs)
    return found


def dispatch_of_one_rank() -> FastDispatch:
    """Return the dispatch table of this process alone, from which calls may be made."""
    dispatch = Intracomm(MPI.COMM_SELF)._scope.channel.dispatch
    dispatch.open()
    return dispatch


def table() -> int:
    return dispatch_of_one_rank().address


def read_spec(spec: Any) -> tuple[int, list[int], list[int]]:
    counts, displs = np.full(3, -7), np.full(3, -7)
    found = read(table(), id(spec), 3, counts.ctypes.data, displs.ctypes.data)
    return found, counts.tolist(), displs.tolist()


def test_ints_and_tuples_are_laid_out_as_expected() -> None:
    assert builtin_objects.knows_numbers(dispatch_table.header_nbytes())


def test_another_layout_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    header = dispatch_table.header_nbytes()
    with monkeypatch.context() as patch:
        patch.setattr(builtin_objects, "tuple_items", lambda: tuple.__basicsize__ - 8)
        assert not builtin_objects.knows_numbers(header)
    other = not builtin_objects.has_tags()
    monkeypatch.setattr(builtin_objects, "has_tags", lambda: other)
    assert not builtin_objects.knows_numbers(header)


@pytest.mark.parametrize("name", READ)
def test_common_forms_are_read_as_python_reads_them(name: str) -> None:
    blocks = plain_blocks(READ[name], 3)
    assert blocks is not None
    assert read_spec(READ[name]) == (id(blocks.array), list(blocks.counts), list(blocks.displs))


@pytest.mark.parametrize("name", LEFT)
def test_other_forms_are_left_to_python(name: str) -> None:
    assert read_spec(LEFT[name])[0] == 0


def test_nothing_is_read_where_layouts_are_unknown() -> None:
    """As in a table without the words that say what an int is."""
    words = np.zeros(dispatch_table.table_words(1), np.int64)
    words[dispatch_table.HEADER] = dispatch_table.header_nbytes()
    counts = np.zeros(6, np.int64)
    address = counts.ctypes.data
    assert read(words.ctypes.data, id(READ["counts"]), 3, address, address + 24) == 0


def code(collective: int, send: Any, recv: Any) -> int:
    return int(check_vectors.run(table(), collective, send, recv, 0))


RIGHT: dict[str, tuple[int, Any, Any]] = {
    "gatherv": (GATHER, np.ones(3), [np.zeros(3), [3], MPI.DOUBLE]),
    "gatherv with a gap": (GATHER, np.ones(3), [np.zeros(5), [3], [2], MPI.DOUBLE]),
    "gatherv of a list": (GATHER, [np.ones(3), MPI.DOUBLE], [np.zeros(3), [3], MPI.DOUBLE]),
    "scatterv": (SCATTER, [np.ones(3), [3], MPI.DOUBLE], np.zeros(3)),
    "alltoallv": (ALLTOALL, [np.ones(3), [3], MPI.DOUBLE], [np.zeros(3), [3], MPI.DOUBLE]),
}
LOCKED = np.ones(3)
LOCKED.flags.writeable = False
SAME = np.ones(6)
WRONG: dict[str, tuple[int, Any, Any]] = {
    "another count": (GATHER, np.ones(2), [np.zeros(3), [3], MPI.DOUBLE]),
    "beyond the end": (GATHER, np.ones(3), [np.zeros(4), [3], [2], MPI.DOUBLE]),
    "far beyond the end": (GATHER, np.ones(3), [np.zeros(4), [3], [(1 << 60) - 1], MPI.DOUBLE]),
    "another type": (GATHER, np.ones(3, np.float32), [np.zeros(3), [3], MPI.DOUBLE]),
    "locked": (SCATTER, [np.ones(3), [3], MPI.DOUBLE], LOCKED),
    "locked blocks": (GATHER, np.ones(3), [LOCKED, [3], MPI.DOUBLE]),
    "strided": (GATHER, SAME[::2], [np.zeros(3), [3], MPI.DOUBLE]),
    "the same memory": (SCATTER, [SAME, [3], MPI.DOUBLE], SAME[2:5]),
    "the same memory twice": (ALLTOALL, [SAME, [3], MPI.DOUBLE], [SAME, [3], MPI.DOUBLE]),
    "in place": (ALLTOALL, MPI.IN_PLACE, [SAME, [3], MPI.DOUBLE]),
    "counts that differ": (ALLTOALL, [np.ones(3), [2], MPI.DOUBLE], [np.zeros(3), [3], MPI.DOUBLE]),
}


@pytest.mark.parametrize("name", RIGHT)
def test_arguments_that_are_right_have_a_code(name: str) -> None:
    assert code(*RIGHT[name]) == 2 * DTYPES.index(np.dtype(float)) + 1


def test_a_rank_without_elements_has_another_code() -> None:
    assert code(GATHER, np.ones(0), [np.zeros(3), [0], MPI.DOUBLE]) == 2 * DTYPES.index(np.dtype(float))


@pytest.mark.parametrize("name", WRONG)
def test_other_arguments_are_left_to_python(name: str) -> None:
    assert code(*WRONG[name]) == -1


def test_calls_of_the_mpi_library_are_numbered_and_remembered() -> None:
    dispatch, signature = dispatch_of_one_rank(), Signature.of("Gatherv(root=0, algorithm=native)")
    before = dispatch.number
    assert number_call.run(dispatch.address, dispatch.remember(signature)) == before + 1 == dispatch.number
    assert dispatch.recall(before + 1) is signature
    dispatch.known()  # forgets signatures of calls that are long past
    assert dispatch.recall(before + 1) is signature


def test_nothing_is_checked_or_numbered_where_no_call_may_be_made() -> None:
    """As after a failure, and while another call is being made."""
    dispatch = dispatch_of_one_rank()
    number = dispatch.number
    for close in (dispatch.hold, lambda: dispatch.busy.__setitem__(0, 1)):
        dispatch.open()
        close()
        try:
            assert check_vectors.run(dispatch.address, GATHER, RIGHT["gatherv"][1], RIGHT["gatherv"][2], 0) == -1
            assert number_call.run(dispatch.address, 1) == 0
        finally:
            dispatch.busy[0] = 0
    assert dispatch.number == number
