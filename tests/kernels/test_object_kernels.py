"""Kernels that are called with objects."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from mpicoll import Intracomm
from mpicoll.kernels import dispatch, nonblocking_calls, object_kernels
from mpicoll.kernels.decorators import DISABLED
from mpicoll.kernels.operation_words import BCAST, DONE, OTHER
from mpicoll.kernels.uneven_calls import call_uneven, call_uneven_in

pytestmark = pytest.mark.skipif(DISABLED, reason="nothing is compiled")


class Index:
    """Something that is no int, but stands for one."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __index__(self) -> Any:
        if isinstance(self.value, Exception):
            raise self.value
        return self.value


def call(root: Any) -> int:
    comm, buf = Intracomm(MPI.COMM_SELF), np.ones(3)
    comm.Bcast(buf)
    return int(dispatch.call.run(comm._table, BCAST, None, buf, None, root))


@pytest.mark.parametrize("root", [0, False, np.int64(0), np.uint8(0), Index(0)])
def test_what_stands_for_an_int_is_a_root(root: Any) -> None:
    assert call(root) in (DONE, OTHER)


@pytest.mark.parametrize(
    "root", [1, -1, 2**62, 2**63, -(2**70), 0.0, "0", None, np.zeros(1), Index("0"), Index(ValueError("not now"))]
)
def test_what_is_no_root_is_left_to_python_without_an_exception(root: Any) -> None:
    assert call(root) == OTHER
    assert sys.exc_info() == (None, None, None)


@pytest.mark.parametrize("kernel", [dispatch.call, nonblocking_calls.call_in, call_uneven, call_uneven_in])
def test_a_wrong_number_of_arguments_is_an_error(kernel: Any) -> None:
    for count in (0, 1, 5, 8):
        with pytest.raises(SystemError):
            kernel.run(*range(count))


def test_references_are_counted() -> None:
    comm, buf, op = Intracomm(MPI.COMM_SELF), np.ones(3), MPI.SUM
    comm.Allreduce(buf, np.ones(3))
    watched = (buf, op, None, 1000)
    before = [sys.getrefcount(each) for each in watched]
    for _ in range(100):
        comm.Bcast(buf)
        comm.Allreduce(MPI.IN_PLACE, buf, op)
    assert [abs(now - then) < 50 for now, then in zip(map(sys.getrefcount, watched), before, strict=True)] == [True] * 4


def test_all_are_compiled_beforehand() -> None:
    text = "from mpicoll.kernels import precompile, object_kernels; precompile.compile_shared();"
    text += "print(sorted(each.function.__name__ for each in object_kernels.made if 'address' in vars(each.native)))"
    found = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True, timeout=300)
    ours = [each.function for each in object_kernels.made if each.function.__module__.startswith("mpicoll.kernels.")]
    assert found.stdout.strip() == str(sorted(each.__name__ for each in ours))
