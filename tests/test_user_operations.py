"""Operations made by `mpicoll.op`, as far as they are used without a communicator."""

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

import mpicoll

LATER = mpicoll.op(lambda a, b: 2 * a + b, commutative=False)


@pytest.mark.parametrize("dtype", [np.float64, np.float16, ml_dtypes.bfloat16, np.int8, np.complex64])
def test_reduce_local(dtype):
    a, b = np.arange(10).astype(dtype), np.ones(10, dtype)
    LATER.Reduce_local(a, b)
    assert (b == (2 * np.arange(10) + 1).astype(dtype)).all()
    assert (a == np.arange(10).astype(dtype)).all()


def test_reduce_local_takes_what_mpi4py_takes():
    a, b = np.arange(10.0), np.ones(10)
    LATER.Reduce_local([a, 4, MPI.DOUBLE], [b[2:], 4, MPI.DOUBLE])
    assert b.tolist() == [1, 1, 1, 3, 5, 7, 1, 1, 1, 1]
    strided = np.zeros((4, 2))
    LATER.Reduce_local(np.arange(4.0), strided.T[:1])
    assert strided.tolist() == [[0, 0], [2, 0], [4, 0], [6, 0]]
    same = np.ones(3)
    LATER.Reduce_local(same, same)
    assert same.tolist() == [3, 3, 3]
    overlapping = np.arange(6.0)
    LATER.Reduce_local(overlapping[:4], overlapping[1:5])
    assert overlapping.tolist() == [0, 1, 4, 7, 10, 5]
    LATER.Reduce_local(np.empty(0), np.empty(0))


def test_wrong_buffers_are_named():
    with pytest.raises(ValueError, match="inbuf: 3 elements of float64; inoutbuf has 4 of float64"):
        LATER.Reduce_local(np.ones(3), np.ones(4))
    with pytest.raises(ValueError, match="of float32"):
        LATER.Reduce_local(np.ones(3), np.ones(3, np.float32))
    result = np.ones(3)
    result.flags.writeable = False
    with pytest.raises((TypeError, ValueError), match="inoutbuf"):
        LATER.Reduce_local(np.ones(3), result)


def test_queries_of_an_operation():
    assert not LATER.Is_commutative()
    assert not LATER.is_commutative
    assert not LATER.is_predefined
    assert mpicoll.op(max).is_commutative
