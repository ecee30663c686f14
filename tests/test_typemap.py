"""Typemaps name the bytes of a datatype's elements in their order, and packing copies those and nothing else."""

from __future__ import annotations

import random

import numpy as np
import pytest
from mpi4py import MPI

from mpicoll.buffers.flat import resolve
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
