"""What the compiled path sees of arrays, and how calls are told apart."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mpi4py import MPI
from numba import config

from mpicoll import Intracomm
from mpicoll.kernels import builtin_objects, dispatch, dispatch_table
from mpicoll.kernels.operation_words import ALLREDUCE, DONE, OTHER
from mpicoll.kernels.reduce import DTYPES

pytestmark = pytest.mark.skipif(bool(config.DISABLE_JIT), reason="there is no machine code without a JIT")


def test_arrays_are_laid_out_as_expected() -> None:
    assert dispatch_table.layout_error() == ""


def test_another_layout_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch_table, "header_nbytes", lambda: 24)
    assert "laid out" in dispatch_table.layout_error()


def test_different_calls_have_different_words() -> None:
    seen = {
        dispatch_table.pack_call(collective, single_copy, dtype, op, root)
        for collective in range(11)
        for single_copy in (0, 1)
        for dtype in range(15)
        for op in (0, 9, 16, 0xFFFF)
        for root in (0, 1, 2**30)
    }
    assert len(seen) == 11 * 2 * 15 * 4 * 3
    assert min(seen) >= 0


def test_lists_are_laid_out_as_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    assert builtin_objects.knows_lists()
    monkeypatch.setattr(builtin_objects, "header_nbytes", lambda: 24)
    assert not builtin_objects.knows_lists()


def _status(comm: Any, sendbuf: Any, recvbuf: Any) -> int:
    status: int = dispatch.call.run(comm._table, ALLREDUCE, sendbuf, recvbuf, MPI.SUM, 0)
    return status


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype.kind in "iufc" and dtype.itemsize > 2])
def test_an_array_with_its_datatype_is_taken_as_the_array(dtype: np.dtype) -> None:
    comm = Intracomm(MPI.COMM_SELF)
    comm.Allreduce(np.ones(5, dtype), np.ones(5, dtype))  # compiled code makes a call that was made before
    own, other = MPI._typedict[dtype.char], MPI._typedict["h"]
    send, recv = np.arange(5).astype(dtype), np.zeros(5, dtype)
    for sendbuf, recvbuf in (([send, own], [recv, own]), (send, [recv, own]), ([send, own], recv)):
        recv[:] = 0
        assert _status(comm, sendbuf, recvbuf) == DONE
        assert (recv == send).all()
    lists: list[Any] = [[send, other], [send, None], [own, send], [send, own, 1], [send], []]
    lists += [[[send], own], [np.repeat(send, 2)[::2], own], [None, own]]
    for wrong in lists:
        recv[:] = 7
        assert _status(comm, wrong, recv) == _status(comm, recv, wrong) == OTHER
        assert (recv == 7).all()


def test_a_list_is_no_place_for_a_result_that_must_not_be_written() -> None:
    comm = Intracomm(MPI.COMM_SELF)
    comm.Allreduce(np.ones(3), np.ones(3))
    locked = np.zeros(3)
    locked.flags.writeable = False
    assert _status(comm, np.ones(3), [locked, MPI.DOUBLE]) == OTHER
    assert _status(comm, [locked, MPI.DOUBLE], [np.ones(3), MPI.DOUBLE]) == DONE
