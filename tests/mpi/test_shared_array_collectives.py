"""Arrays in shared memory: which are, which are not, and for how long."""

from __future__ import annotations

import asyncio
import gc
import threading

import numpy as np
import pytest
from mpi4py import MPI

import mpicoll
from mpicoll import Intracomm
from mpicoll.kernels import allocator
from mpicoll.shared_memory import numpy_allocator, segment
from tests.mpi.memory import SEGMENTS

pytestmark = [
    pytest.mark.mpi(min_size=2),
    pytest.mark.skipif(not SEGMENTS, reason="no shared memory for arrays"),
]
COUNT = 10_000


def inside(array: np.ndarray) -> bool:
    home = segment.own()
    return bool(home.nbytes > 0 and 0 <= array.ctypes.data - home.address < home.nbytes)


def used() -> int:
    gc.collect()
    source = numpy_allocator.source()
    assert source is not None
    return int(source.words[allocator.USED])


def test_numpys_own_results_are_shared() -> None:
    outside = np.ones(COUNT)
    with mpicoll.shared_arrays():
        x = np.empty(COUNT)
        x[:] = 2
        made = [x, x + outside, x.copy(), np.zeros((100, 100)), np.full(COUNT, 3), np.concatenate([x, x]), x[x > 1]]
        made += [np.asfortranarray(x.reshape(100, 100)), x.astype(np.float32), np.sqrt(x), np.arange(COUNT)]
        small = np.zeros(10)
    assert all(map(inside, made))
    assert inside(x[5:50])
    assert not inside(small)
    assert not inside(outside)
    assert not inside(np.zeros(COUNT))
    assert (made[1] == 3).all()
    assert not made[3].any()


def test_nested_and_after_an_exception() -> None:
    with mpicoll.shared_arrays():
        with mpicoll.shared_arrays():
            assert inside(np.empty(COUNT))
        assert inside(np.empty(COUNT))
        with pytest.raises(LookupError), mpicoll.shared_arrays():
            raise LookupError
        assert inside(np.empty(COUNT))
    assert not inside(np.empty(COUNT))
    with pytest.raises(LookupError), mpicoll.shared_arrays():
        raise LookupError
    assert not inside(np.empty(COUNT))


def test_min_nbytes_holds_inside_only() -> None:
    with mpicoll.shared_arrays(min_nbytes=1 << 20):
        assert not inside(np.empty(COUNT))
        assert inside(np.empty(1 << 20, np.uint8))
        with mpicoll.shared_arrays(min_nbytes=100):
            assert inside(np.empty(100, np.uint8))
        assert not inside(np.empty(COUNT))
    with mpicoll.shared_arrays():
        assert inside(np.empty(COUNT))


@pytest.mark.parametrize("wrong", [-1, 2.5, "many"])
def test_wrong_arguments(wrong: object) -> None:
    with pytest.raises(ValueError, match="min_nbytes"):
        mpicoll.shared_arrays(min_nbytes=wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="comm"):
        mpicoll.shared_arrays(wrong)  # type: ignore[arg-type]


def test_enable_and_disable(comm: Intracomm) -> None:
    switch = mpicoll.shared_arrays(comm)
    switch.disable()
    assert not inside(np.empty(COUNT))
    switch.enable()
    data = np.ones(COUNT)
    switch.disable()
    switch.disable()
    assert inside(data)
    assert not inside(np.empty(COUNT))
    comm.Allreduce(MPI.IN_PLACE, data)
    assert (data == comm.size).all()


def test_other_threads_and_tasks_choose_for_themselves() -> None:
    seen: list[bool] = []

    async def look() -> None:
        seen.append(inside(np.empty(COUNT)))

    with mpicoll.shared_arrays():
        thread = threading.Thread(target=lambda: seen.append(inside(np.empty(COUNT))))
        thread.start()
        thread.join()
        asyncio.run(look())
    asyncio.run(look())
    assert seen == [False, True, False]


def test_arrays_live_as_long_as_they_are_used(comm: Intracomm) -> None:
    before = used()
    with mpicoll.shared_arrays():
        kept = np.arange(COUNT) + comm.rank
        part = np.arange(COUNT)[COUNT // 2 :]
    del comm
    assert used() > before
    assert (kept == np.arange(COUNT) + MPI.COMM_WORLD.rank).all()
    part += 1
    assert part[0] == COUNT // 2 + 1
    del kept, part
    assert used() == before


def test_a_thousand_arrays_take_no_more_room_than_one() -> None:
    source = numpy_allocator.source()
    assert source is not None
    with mpicoll.shared_arrays():
        data = np.ones(COUNT)
        data = data + 1
        highest = int(source.words[allocator.NEXT])
        for _ in range(1000):
            data = data + 1
    assert data[0] == 1002
    assert source.words[allocator.NEXT] <= highest + 2 * data.nbytes


def test_communicators_have_no_arrays_of_their_own(comm: Intracomm) -> None:
    made = comm.empty((3, COUNT), np.float32), comm.zeros(COUNT, bool), comm.empty(3), comm.zeros((0, 5))
    assert [array.shape for array in made] == [(3, COUNT), (COUNT,), (3,), (0, 5)]
    assert [array.dtype for array in made] == [np.float32, bool, np.float64, np.float64]
    assert all(map(inside, made[:3]))
    assert not made[1].any()
    other = Intracomm(comm.Split(comm.rank % 2, -comm.rank), timeout=20)
    made[0][:] = comm.rank
    other.Bcast(made[0])
    assert (made[0] == made[0][0, 0]).all()
    other.Free()
    made[0][:] = 1
    comm.Allreduce(MPI.IN_PLACE, made[0])
    assert (made[0] == comm.size).all()


@pytest.mark.parametrize("nbytes", [(1 << 63) - 1, (1 << 62) + 1])
def test_far_too_large_arrays_are_memory_errors(comm: Intracomm, nbytes: int) -> None:
    with pytest.raises((MemoryError, ValueError)):
        comm.empty(nbytes, np.uint8)
