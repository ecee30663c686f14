"""Keys of buffer specifications differ where their counts do."""

from __future__ import annotations

from array import array

import numpy as np
import pytest
from mpi4py import MPI

from mpicoll.buffers.plain_specs import array_of, key_of, plain_blocks

X = np.zeros(6)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([X, np.array([1, 1], ">i4")], [X, np.array([1 << 24, 1 << 24], "<i4")]),
        ([X, np.array([1, 2], np.int32)], [X, np.array([1, 2], np.uint32)]),
        ([X, [1, 2]], [X, [1, 2], [0, 3], MPI.DOUBLE]),
        ([X, [1, 2]], [X.astype(np.float32), [1, 2]]),
        (X, X[:4]),
        ([X, MPI.DOUBLE], [X[:4], MPI.DOUBLE]),
    ],
)
def test_other_specifications_have_other_keys(one: object, other: object) -> None:
    assert key_of(one)[1] is not None
    assert key_of(one)[1] != key_of(other)[1]


@pytest.mark.parametrize("counts", [[1.0, 2], [True, 2], [[1], [2]], np.array([1.0, 2.0])])
def test_counts_that_are_no_whole_numbers_are_not_those_before(counts: object) -> None:
    if not isinstance(counts, np.ndarray):
        assert key_of([X, counts])[1] is None
    assert plain_blocks([X, counts], 2) is None


def test_vectors_and_lists_mean_the_same() -> None:
    wanted = plain_blocks([X, [2, 3], [0, 2], MPI.DOUBLE], 2)
    assert wanted is not None
    for counts, displs in (((2, 3), (0, 2)), (np.array([2, 3], np.uint8), np.array([0, 2]))):
        found = plain_blocks([X, counts, displs, MPI.DOUBLE], 2)
        assert found is not None
        assert found[1:] == wanted[1:]
    assert plain_blocks(X, 4)[1] == (2, 2, 1, 1)  # type: ignore[index]


def test_one_count_is_that_of_each_block() -> None:
    assert plain_blocks([X, 3], 2) == plain_blocks([X, [3, 3]], 2)
    assert key_of([X, 3])[1] != key_of([X, 2])[1]
    assert plain_blocks([X, -1], 2) is None


@pytest.mark.parametrize("made", [array("i", [1, 2, 3]), bytearray(b"abc"), memoryview(bytearray(b"abc"))])
def test_buffers_are_seen_as_arrays_of_their_memory(made: object) -> None:
    found = array_of(made)
    assert type(found) is np.ndarray
    assert found.flags.writeable
    found[0] = 7
    assert memoryview(made)[0] == 7  # type: ignore[arg-type]


def test_what_is_read_only_is_an_array_only_where_it_is_sent() -> None:
    assert array_of(b"abc") == b"abc"
    assert array_of(b"abc", sent=True).tolist() == list(b"abc")
    assert array_of(MPI.IN_PLACE) is MPI.IN_PLACE
    assert array_of(None) is None
