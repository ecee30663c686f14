"""NumPy arrays in shared memory, in one process."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
import threading

import numpy as np
import pytest
from mpi4py import MPI

import mpicoll
from mpicoll.kernels import allocator
from mpicoll.shared_memory import numpy_allocator, segment

made = numpy_allocator.source()
pytestmark = pytest.mark.skipif(made is None, reason="arrays cannot be allocated in shared memory here")


def inside(array: np.ndarray) -> bool:
    home = segment.own()
    return 0 <= array.ctypes.data - home.address < home.nbytes


def used() -> int:
    assert made is not None
    gc.collect()
    return int(made.words[allocator.USED])


def test_every_large_array_goes_there_and_comes_back() -> None:
    before = used()
    with mpicoll.shared_arrays(MPI.COMM_SELF):
        x = np.ones(100_000)
        arrays = [x, x + 1, x.copy(), np.empty((300, 300)), np.arange(50_000), x.astype(np.float32), np.zeros(9000)]
        assert all(inside(array) for array in arrays)
        assert not inside(np.ones(10))
    assert not inside(np.ones(100_000))
    assert (arrays[1] == 2).all()
    assert used() > before
    del x, arrays
    assert used() == before


def test_one_array_at_a_time() -> None:
    comm = mpicoll.Intracomm(MPI.COMM_SELF.Dup())
    before = used()
    small, large = comm.empty((3, 4), np.int16), comm.zeros(100_000)
    assert inside(small)
    assert inside(large)
    assert small.shape == (3, 4)
    assert small.dtype == np.int16
    assert small.flags.owndata
    assert not large.any()
    large[:] = 1
    del large
    again = comm.zeros(100_000)
    assert not again.any(), "memory that was used before must be cleared"
    del small, again
    assert used() == before
    comm.Free()


def test_nested_and_after_an_exception() -> None:
    outer = mpicoll.shared_arrays(min_nbytes=100)
    with outer:
        with pytest.raises(ZeroDivisionError), mpicoll.shared_arrays(min_nbytes=10_000):
            raise ZeroDivisionError
        assert inside(np.ones(100))
    assert not inside(np.ones(100_000))


def test_enable_and_disable() -> None:
    switch = mpicoll.shared_arrays()
    switch.enable()
    try:
        assert inside(np.ones(100_000))
    finally:
        switch.disable()
    switch.disable()
    assert not inside(np.ones(100_000))


def test_other_threads_are_not_concerned() -> None:
    seen: list[bool] = []
    with mpicoll.shared_arrays():
        thread = threading.Thread(target=lambda: seen.append(inside(np.ones(100_000))))
        thread.start()
        thread.join()
    if sys.version_info < (3, 14):
        assert seen == [False]


def test_many_threads_allocate_and_free() -> None:
    before, wrong = used(), []

    def work(number: int) -> None:
        with mpicoll.shared_arrays():
            for turn in range(200):
                array = np.full(3000 + 17 * turn, number)
                wrong.append(not (inside(array) and (array == number).all()))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not any(wrong)
    assert used() == before


@pytest.mark.parametrize(("argument", "value"), [("comm", 3), ("min_nbytes", -1), ("min_nbytes", 2.5)])
def test_wrong_arguments(argument: str, value: object) -> None:
    with pytest.raises((TypeError, ValueError), match=argument):
        mpicoll.shared_arrays(**{argument: value})  # type: ignore[arg-type]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_leaves_the_arena_alone() -> None:
    array = numpy_allocator.empty(50_000, np.float64)
    array[:] = 7
    child = os.fork()
    if child == 0:
        other = numpy_allocator.empty(50_000, np.float64)
        other[:] = 1
        os._exit(int(inside(other)))
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert (array == 7).all()


@pytest.mark.parametrize("library", ["with MPI", "without"])
def test_arrays_may_outlive_everything(library: str) -> None:
    """Arrays in globals, classes and cycles are freed when the interpreter is nearly gone."""
    program = """
        import numpy as np
        from mpicoll.shared_memory import numpy_allocator as shared_arrays
        with shared_arrays.shared_arrays():
            kept = np.ones(1_000_000)
            class Holder:
                array = kept + 1
            cycle = [np.zeros(50_000)]
            cycle.append(cycle)
        last = shared_arrays.empty(10, float)
    """
    text = textwrap.dedent(program)
    if library == "with MPI":
        text = "from mpi4py import MPI\nimport mpicoll\ncomm = mpicoll.Intracomm(MPI.COMM_WORLD)\n" + text
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_threads_that_are_the_first_share_one_heap() -> None:
    """Two heaps would hand out the same memory."""
    text = (
        "import threading, time\n"
        "from mpicoll.shared_memory import numpy_allocator as shared_arrays\n"
        "works, made, ready = shared_arrays._works, [], threading.Barrier(4)\n"
        "shared_arrays._works = lambda source: time.sleep(0.1) or works(source)\n"
        "def first():\n"
        "    ready.wait()\n"
        "    made.append(shared_arrays.empty(1000, float))\n"
        "threads = [threading.Thread(target=first) for _ in range(4)]\n"
        "[thread.start() for thread in threads]; [thread.join() for thread in threads]\n"
        "places = sorted(array.ctypes.data for array in made)\n"
        "assert all(b - a >= 8000 for a, b in zip(places, places[1:])), places\n"
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
