"""Typemaps name the bytes of a datatype's elements in their order, and packing copies those and nothing else."""

from __future__ import annotations

import random

import numpy as np
import pytest
from mpi4py import MPI

from mpicoll.buffers.flat import resolve
from mpicoll.buffers.strided import Strided, joined
from mpicoll.buffers.typemap import typemap_of
from tests import layouts

DTYPES = ("float64", "int32", "uint16", "int8", "complex128")


@pytest.mark.parametrize("seed", range(40))
def test_random_layouts_are_packed_and_unpacked(seed: int) -> None:
    numbers = random.Random(seed)
    for _ in range(25):
        dtype, each, entries = np.dtype(numbers.choice(DTYPES)), numbers.randrange(1, 30), numbers.randrange(4)
        layout = layouts.draw(numbers, dtype, each)
        scattered = layouts.Scattered(layout, each * entries, dtype)
        values = np.arange(each * entries) % 100
        scattered.values = values
        buffer = resolve(scattered.spec(), "buf", writable=True, moved=True)
        assert buffer.count == each * entries
        if entries:
            assert buffer.dtype == dtype
            assert (buffer.owner == values).all()
            buffer.owner[...] = values[::-1]
            buffer.give_back()
            assert (scattered.values == values[::-1]).all()
        assert scattered.is_intact()
        layout.datatype.Free()


def test_a_typemap_is_worked_out_once_and_lives_as_long_as_its_datatype() -> None:
    made = MPI.DOUBLE.Create_vector(3, 1, 2)
    assert typemap_of(made) is typemap_of(made)
    assert typemap_of(made).offsets.tolist() == [0, 16, 32]
    copy = made.Dup()
    assert typemap_of(copy).offsets.tolist() == [0, 16, 32]
    made.Free()
    copy.Free()
    other = MPI.INT.Create_contiguous(5)
    assert typemap_of(other).lengths.tolist() == [20]
    other.Free()


def test_parts_without_elements_do_not_count() -> None:
    nothing = MPI.INT.Create_contiguous(0)
    made = MPI.Datatype.Create_struct([2, 0, 3], [0, 4, 8], [MPI.DOUBLE, MPI.SHORT, nothing])
    assert typemap_of(made).types == {np.dtype(float)}
    assert typemap_of(made).reach == (0, 16)
    nothing.Free()
    made.Free()


@pytest.mark.parametrize("pair", [MPI.DOUBLE_INT, MPI.SHORT_INT, MPI.TWOINT])
def test_pairs_have_two_elements(pair: MPI.Datatype) -> None:
    assert typemap_of(pair).nbytes == pair.Get_size()
    assert typemap_of(pair).extent == pair.Get_extent()[1]


def test_large_blocks_take_no_memory() -> None:
    made = MPI.DOUBLE.Create_contiguous(1 << 28)
    assert typemap_of(made).lengths.tolist() == [8 << 28]
    made.Free()


def test_subarrays_are_described_without_listing_their_runs() -> None:
    made = MPI.DOUBLE.Create_subarray([1 << 12, 1 << 12, 1 << 12], [1 << 11, 1 << 10, 4], [1, 2, 3])
    found = typemap_of(made)
    assert found.strided == Strided(8 * (3 + (2 << 12) + (1 << 24)), 32, (1 << 11, 1 << 10), (8 << 24, 8 << 12))
    assert found.nbytes == made.Get_size()
    assert found.reach[1] - found.reach[0] == made.Get_true_extent()[1]
    made.Free()


@pytest.mark.parametrize("order", [MPI.ORDER_C, MPI.ORDER_FORTRAN], ids=["C", "Fortran"])
@pytest.mark.parametrize("subsizes", [[2, 3, 4], [4, 3, 5], [1, 5, 1], [3, 0, 2], [4, 5, 6]])
def test_subarrays_have_the_runs_of_the_array(subsizes: list[int], order: int) -> None:
    sizes, starts = [4, 5, 6], [0, 0, 0]
    made = MPI.INT16_T.Create_contiguous(2).Create_subarray(sizes, subsizes, starts, order)
    numbers = np.arange(120).reshape(sizes, order="C" if order == MPI.ORDER_C else "F")
    chosen = numbers[tuple(map(slice, subsizes))].ravel(order="C" if order == MPI.ORDER_C else "F")
    found = typemap_of(made)
    covered = [
        byte for at, n in zip(found.offsets.tolist(), found.lengths.tolist(), strict=True) for byte in range(at, at + n)
    ]
    assert covered == [4 * number + byte for number in chosen.tolist() for byte in range(4)]
    made.Free()


def test_runs_that_follow_each_other_are_joined() -> None:
    assert joined(4, 8, (3, 1, 2, 5), (80, 7, 40, 8)) == Strided(4, 240, (), ())
    assert joined(0, 8, (2, 3), (100, 16)) == Strided(0, 8, (2, 3), (100, 16))
    assert joined(0, 8, (4, 3), (48, 16)) == Strided(0, 8, (12,), (16,))
    assert joined(0, 8, (4, 0), (48, 16)) is None
    assert joined(0, 8, (3,), (-16,)) == Strided(0, 8, (3,), (-16,))
    assert Strided(0, 8, (3,), (-16,)).reach == (-32, 8)
