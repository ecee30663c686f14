"""Descriptions of all parts of a vector collective that are kept for entries of derived datatypes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from mpicoll.collectives import whole_vectors
from mpicoll.collectives.whole_vectors import WholeVectors


def block(rows: int, width: int, across: int) -> MPI.Datatype:
    """A block of a matrix with `across` blocks of this width in a row; the next entry is the block to the right."""
    whole = MPI.INT64_T.Create_vector(rows, width, width * across)
    made = whole.Create_resized(0, 8 * width).Commit()
    whole.Free()
    return made


@pytest.fixture
def half() -> Iterator[MPI.Datatype]:
    made = block(2, 3, 2)
    yield made
    made.Free()


def matrix() -> np.ndarray:
    return np.arange(24).reshape(4, 6)


def blocks(of: np.ndarray, order: list[int]) -> list[int]:
    """Elements of the blocks of 2 rows and 3 columns, which begin at a multiple of 3."""
    return [value for at in order for value in of[at // 2 : at // 2 + 2, at % 2 * 3 : at % 2 * 3 + 3].ravel()]


@pytest.fixture
def described(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Specifications that had to be described."""
    seen: list[Any] = []
    original = whole_vectors._described
    monkeypatch.setattr(whole_vectors, "_described", lambda spec, size: seen.append(spec) or original(spec, size))
    return seen


@pytest.mark.parametrize(
    ("counts", "displs", "order"),
    [
        ([1, 1], None, [0, 1]),
        ([1, 1], [0, 1], [0, 1]),
        ([1, 1], [5, 4], [5, 4]),
        ([2, 0], [4, 9], [4, 5]),
        ([0, 1], [0, 1], [1]),
        ([1, 1], (4, 1), [4, 1]),
        (np.array([1, 1]), np.array([1, 4]), [1, 4]),
    ],
)
def test_known_entries_are_packed_and_unpacked(
    counts: Any, displs: Any, order: list[int], half: MPI.Datatype, described: list[Any]
) -> None:
    wholes = WholeVectors(2)
    for turn in range(3):
        array = matrix() + 100 * turn
        spec = [array, counts, half] if displs is None else [array, (counts, displs), half]
        whole = wholes.find(spec, written=False)
        assert whole is not None
        whole.pack()
        assert whole.vector.ravel().tolist() == blocks(array, order)
        assert whole.lengths.counts == tuple(6 * int(count) for count in counts)
        whole = wholes.find(spec, written=True)
        assert whole is not None
        whole.vector.reshape(-1)[:] = range(1000, 1000 + whole.vector.size)
        whole.unpack()
        assert blocks(array, order) == list(range(1000, 1000 + whole.vector.size))
        assert (array >= 1000).sum() == whole.vector.size
    assert len(described) == 1


def test_other_arrays_and_counts_are_described_anew(half: MPI.Datatype, described: list[Any]) -> None:
    wholes = WholeVectors(2)
    longer = np.zeros((6, 6), np.int64)
    for spec in ([matrix(), [1, 1], half], [longer, [1, 1], half], [longer, [1, 1], [4, 5], half]):
        assert wholes.find(spec, written=False) is not None
    assert wholes.find([matrix(), [1, 1], [4, 6], half], written=False) is None
    assert wholes.find([matrix()[:3], [1, 1], [4, 5], half], written=False) is None
    assert wholes.find([matrix(), [1, 1, 1], half], written=False) is None
    assert len(described) == 6


def test_what_cannot_be_written(half: MPI.Datatype) -> None:
    wholes = WholeVectors(2)
    array = matrix()
    for _ in range(2):
        assert wholes.find([array, [1, 1], [1, 1], half], written=False) is not None
        assert wholes.find([array, [1, 1], [1, 1], half], written=True) is None
        assert wholes.find([array, [1, 1], half], written=True) is not None
        array.flags.writeable = False
        assert wholes.find([array, [1, 1], half], written=True) is None
        assert wholes.find([array, [1, 1], half], written=False) is not None
        array.flags.writeable = True


def test_a_datatype_with_the_handle_of_a_freed_one() -> None:
    wholes = WholeVectors(2)
    for turn in range(20):
        width = 1 + turn % 3
        made = block(2, width, 2)
        array = np.arange(24)
        whole = wholes.find([array, [1, 1], made], written=False)
        assert whole is not None
        whole.pack()
        wide = array[: 4 * width].reshape(2, 2 * width)
        assert whole.vector.ravel().tolist() == [*wide[:, :width].ravel(), *wide[:, width:].ravel()]
        made.Free()


def test_no_more_descriptions_are_kept_than_allowed(half: MPI.Datatype, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what is used after many others is kept, too."""
    monkeypatch.setattr(whole_vectors, "_MAX_KNOWN", 3)
    wholes = WholeVectors(2)
    for displ in range(8):
        assert wholes.find([matrix(), [1, 0], [displ % 2 + 4 * (displ > 3), 0], half], written=False) is not None
        assert wholes.find([matrix(), [displ, 2]], written=False) is not None
        for kept in (wholes._entries, wholes._lengths):
            assert 0 < len(kept) <= 3
    assert any(key[1] == (7, 2) for key in wholes._lengths)
