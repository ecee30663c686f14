"""Asynchronous work, its futures and errors, messages between two ranks, and rendezvous."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mpi4py import MPI

from mpicoll.errors import CollectiveTimeout, CommunicatorBroken, MismatchError, RemoteError
from mpicoll.torch import base_group, group_communicators, rendezvous

pytestmark = pytest.mark.mpi


def test_many_calls_at_once_keep_their_order(pg: Any) -> None:
    rank, size = pg.rank(), pg.size()
    tensors = [torch.full((1 + 997 * turn,), float(rank + turn)) for turn in range(40)]
    works = [dist.all_reduce(tensor, group=pg, async_op=True) for tensor in tensors]
    now = torch.full((3,), float(rank))
    dist.all_reduce(now, group=pg)  # behind all of those
    assert all(work.is_completed() and work.is_success() for work in works)
    assert (now == sum(range(size))).all()
    for turn, (work, tensor) in enumerate(zip(reversed(works), reversed(tensors), strict=True)):
        assert work.wait() is True
        assert (tensor == sum(range(size)) + size * (39 - turn)).all()
        assert work.result()[0] is tensor
        assert work.exception() is None


def test_ranks_that_wait_and_ranks_that_do_not(pg: Any) -> None:
    rank, size = pg.rank(), pg.size()
    for turn in range(60):
        tensor = torch.full((10 ** (turn % 6),), float(rank))
        work = dist.all_reduce(tensor, group=pg, async_op=(turn + rank) % 3 > 0)
        if work is not None:
            if turn % 2:
                time.sleep(0.001 * rank)
            work.wait()
        assert (tensor == sum(range(size))).all()


def test_futures(pg: Any) -> None:
    size = pg.size()
    tensor = torch.ones(100_000)
    future = dist.all_reduce(tensor, group=pg, async_op=True).get_future()
    halved = future.then(lambda done: done.value()[0] / 2)
    assert (halved.wait() == size / 2).all()
    assert future.done()
    work = dist.all_reduce(tensor, group=pg, async_op=True)
    work.wait()
    assert work.get_future().wait()[0] is tensor


def test_callbacks_may_wait_for_further_calls(pg: Any) -> None:
    size = pg.size()

    def reduce_again(done: Any) -> torch.Tensor:
        (tensor,) = done.value()
        return dist.all_reduce(tensor, group=pg, async_op=True).get_future().wait()[0]

    def and_again(done: Any) -> torch.Tensor:
        tensor = done.value()
        inner = dist.all_reduce(tensor, group=pg, async_op=True).get_future()
        return inner.then(reduce_again).wait()

    for count in (1, 10_000):
        future = dist.all_reduce(torch.ones(count), group=pg, async_op=True).get_future()
        assert (future.then(reduce_again).then(and_again).wait() == size**4).all()
        blocking = torch.ones(count)
        dist.all_reduce(blocking, group=pg)
        assert (blocking == size).all()


def test_callbacks_of_messages_may_wait_for_further_messages(pg: Any) -> None:
    if pg.size() < 2:
        pytest.skip("nobody to send to")
    rank, size = pg.rank(), pg.size()
    first, second = torch.zeros(3), torch.zeros(3)
    works = [
        dist.irecv(each, group_src=(rank - 1) % size, group=pg, tag=tag) for tag, each in enumerate((first, second))
    ]
    later: list[Any] = []

    def wait_for_second(done: Any) -> torch.Tensor:
        later.append(dist.isend(torch.full((3,), 2.0), group_dst=(rank + 1) % size, group=pg, tag=1))
        works[1].wait()
        return second + done.value()[0]

    # First: where the message of tag 0 has come already, `then` calls the function at once, which waits for others.
    first_sent = dist.isend(torch.full((3,), 1.0), group_dst=(rank + 1) % size, group=pg, tag=0)
    total = works[0].get_future().then(wait_for_second)
    first_sent.wait()
    assert total.wait().tolist() == [3.0] * 3
    later[0].wait()


def test_callbacks_that_cpp_code_adds_may_ask_for_futures(pg: Any) -> None:
    works = [dist.all_reduce(torch.ones(count), group=pg, async_op=True) for count in (1, 100_000, 200_000)]
    together = torch.futures.collect_all([work.get_future() for work in works])
    again = together.then(lambda done: [works[-1].get_future().then(lambda last: last.value()[0]), done.value()])
    last, all_of_them = again.wait()
    assert (last.wait() == pg.size()).all()
    assert all((each.value()[0] == pg.size()).all() for each in all_of_them)


def test_an_argument_that_is_wrong_on_all_ranks(pg: Any) -> None:
    with pytest.raises(ValueError, match=r"op: MAX is not defined on tensors of torch\.complex64"):
        pg.allreduce([torch.ones(2, dtype=torch.complex64)], _options(dist.ReduceOp.MAX))
    with pytest.raises(ValueError, match="op: BAND is not defined"):
        dist.all_reduce(torch.ones(2), dist.ReduceOp.BAND, pg)
    with pytest.raises(ValueError, match="it is on meta"):
        dist.all_reduce(torch.ones(2, device="meta"), group=pg)
    with pytest.raises(ValueError, match=r"output_split_sizes: .* are not"):
        dist.all_to_all_single(torch.zeros(7), torch.zeros(7), [7] * (pg.size() + 1), [7] + [0] * (pg.size() - 1), pg)
    work = dist.all_reduce(torch.ones(2), dist.ReduceOp.BXOR, pg, async_op=True)
    with pytest.raises(ValueError, match="op: BXOR"):
        work.wait()
    with pytest.raises(ValueError, match="op: BXOR"):
        work.get_future().wait()
    assert isinstance(work.exception(), ValueError)
    tensor = torch.ones(2)
    dist.all_reduce(tensor, group=pg)
    assert tensor.tolist() == [pg.size()] * 2


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("async_op", [False, True])
def test_an_argument_that_is_wrong_on_one_rank(pg: Any, async_op: bool) -> None:
    began = time.monotonic()
    size = pg.size()
    splits, even = [size] * size if pg.rank() == 1 else [1] * size, [1] * size
    with pytest.raises(ValueError if pg.rank() == 1 else RemoteError, match=r"output_split_sizes: .* are not"):
        _wait(dist.all_to_all_single(torch.zeros(size), torch.zeros(size), splits, even, pg, async_op))
    assert time.monotonic() - began < 10


def _options(op: Any) -> Any:
    options = dist.AllreduceOptions()
    options.reduceOp, options.asyncOp = op, False
    return options


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("async_op", [False, True])
def test_ranks_that_call_something_else(pg: Any, async_op: bool) -> None:
    began = time.monotonic()
    tensor = torch.ones(8 if pg.rank() == 1 else 9)
    with pytest.raises((MismatchError, RemoteError)) as caught:
        _wait(dist.all_reduce(tensor, group=pg, async_op=async_op))
    assert "rank 1" in str(caught.value)
    assert time.monotonic() - began < 10
    with pytest.raises(CommunicatorBroken):
        dist.all_reduce(torch.ones(8), group=pg)


def _wait(work: Any) -> None:
    if work is not None:
        work.wait()


@pytest.mark.mpi(min_size=2)
def test_a_rank_that_does_not_come(world: Any) -> None:
    group = dist.new_group(list(range(world.size())), timeout=timedelta(seconds=1))
    if world.rank() == 0:
        time.sleep(2.5)
        return
    began = time.monotonic()
    tensor = torch.ones(1000)
    work = dist.all_reduce(tensor, group=group, async_op=True)
    with pytest.raises(CollectiveTimeout, match=r"has not ended after 0\.2 s"):
        work.wait(timedelta(seconds=0.2))
    with pytest.raises(CollectiveTimeout) as caught:
        work.wait()
    assert 0 in caught.value.missing_ranks
    assert time.monotonic() - began < 8


@pytest.mark.mpi(min_size=2)
def test_a_monitored_barrier_names_the_ranks(pg: Any) -> None:
    if pg.rank() == 1:
        time.sleep(2)
        return
    with pytest.raises(CollectiveTimeout, match=r"monitored_barrier: ranks .*1"):
        pg.monitored_barrier(timedelta(seconds=0.5))


def test_a_group_that_was_destroyed(world: Any) -> None:
    group = dist.new_group(list(range(world.size())))
    dist.destroy_process_group(group)
    for call in (
        lambda: group.allreduce([torch.ones(1)], _options(dist.ReduceOp.SUM)),
        lambda: group.send([torch.ones(1)], 0, 0),
        lambda: group.recv([torch.ones(1)], 0, 0),
    ):
        with pytest.raises(RuntimeError, match="the process group was shut down"):
            call()
    assert group.comm == MPI.COMM_NULL
    dist.barrier()


@pytest.mark.mpi(min_size=2)
def test_a_group_that_one_rank_does_not_destroy(world: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(base_group, "_CLOSE_SECONDS", 0.3)
    group = dist.new_group(list(range(world.size())))
    if world.rank():
        began = time.monotonic()
        dist.destroy_process_group(group)
        assert time.monotonic() - began < 3
        assert group.comm != MPI.COMM_NULL
    dist.barrier()


@pytest.mark.mpi(min_size=2)
def test_a_group_that_is_destroyed_while_a_call_is_under_way(world: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(base_group, "_CLOSE_SECONDS", 0.3)
    group = dist.new_group(list(range(world.size())))
    tensor = torch.ones(3)
    if world.rank():
        work = dist.all_reduce(tensor, group=group, async_op=True)
        dist.destroy_process_group(group)
        assert group.comm != MPI.COMM_NULL
        dist.barrier()
        assert work.wait()
    else:
        dist.barrier()
        dist.all_reduce(tensor, group=group)
        dist.destroy_process_group(group)
    assert tensor.tolist() == [world.size()] * 3


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64], ids=str)
def test_messages(pg: Any, dtype: torch.dtype) -> None:
    rank, size = pg.rank(), pg.size()
    right, left = (rank + 1) % size, (rank - 1) % size
    for count in (0, 1, 100, 500_000):
        given = (torch.arange(count) % 2 + rank % 2).to(dtype)
        wanted = (torch.arange(count) % 2 + left % 2).to(dtype)
        received = torch.zeros(count, dtype=dtype)
        sending = dist.isend(given, group=pg, tag=count, group_dst=right)
        dist.recv(received, group=pg, tag=count, group_src=left)
        sending.wait()
        assert torch.equal(received, wanted)
        received = torch.zeros(count, dtype=dtype)
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.irecv, received, group=pg, group_peer=left),
                dist.P2POp(dist.isend, given, group=pg, group_peer=right),
            ]
        )
        for work in works:
            work.wait()
        assert torch.equal(received, wanted)


@pytest.mark.mpi(min_size=2)
def test_messages_from_any_rank(pg: Any) -> None:
    rank, size = pg.rank(), pg.size()
    if rank:
        dist.send(torch.full((3,), float(rank)), group=pg, group_dst=0)
        return
    seen = set()
    for _ in range(size - 1):
        tensor = torch.zeros(3)
        source = dist.recv(tensor, group=pg)
        assert (tensor == source).all()
        seen.add(source)
    assert seen == set(range(1, size))


@pytest.mark.mpi(min_size=2)
def test_a_long_message_arrives_while_its_sender_does_something_else(pg: Any) -> None:
    """In a collective, and in a computation that makes no call at all."""
    tensor = torch.arange(3_000_000)
    if pg.rank() == 0:
        works = [dist.isend(tensor, group=pg, tag=tag, group_dst=1) for tag in (1, 2)]
        dist.barrier(pg)
        until = time.monotonic() + 10
        while not works[1].is_completed() and time.monotonic() < until:
            time.sleep(0.01)
        assert works[1].is_completed()
        works[0].wait()
        return
    if pg.rank() == 1:
        for tag in (1, 2):
            received = torch.zeros(3_000_000, dtype=torch.int64)
            dist.recv(received, group=pg, tag=tag, group_src=0)
            assert torch.equal(received, tensor)
            if tag == 1:
                dist.barrier(pg)
        return
    dist.barrier(pg)


@pytest.mark.mpi(min_size=2)
def test_messages_that_go_wrong(world: Any) -> None:
    group = dist.new_group(list(range(world.size())), timeout=timedelta(seconds=0.5))
    rank = world.rank()
    if rank == 0:
        dist.send(torch.zeros(3), group=group, tag=5, group_dst=1)
        with pytest.raises(ValueError, match="tag: -1 is not in 0"):
            dist.send(torch.zeros(3), group=group, tag=-1, group_dst=1)
    if rank == 1:
        with pytest.raises(ValueError, match="12 bytes have come for a tensor of 40"):
            dist.recv(torch.zeros(10), group=group, tag=5, group_src=0)
        with pytest.raises(CollectiveTimeout, match=r"receive from rank 0, tag 6: it has not ended after 0\.5 s"):
            dist.recv(torch.zeros(10), group=group, tag=6, group_src=0)


@pytest.mark.mpi(min_size=2)
def test_a_message_that_was_given_up(pg: Any) -> None:
    """It stays so; what comes later is for the next call that receives."""
    if pg.rank() == 1:
        tensor, later = torch.zeros(3), torch.zeros(3)
        work = dist.irecv(tensor, group=pg, group_src=0)
        assert not work.is_completed()
        for _ in range(2):
            with pytest.raises(CollectiveTimeout, match=r"receive from rank 0, tag 0: it has not ended after 0\.2 s"):
                work.wait(timedelta(seconds=0.2))
        assert not work.is_success()
        dist.barrier(pg)
        dist.recv(later, group=pg, group_src=0)
        assert (tensor.tolist(), later.tolist()) == ([0.0] * 3, [1.0] * 3)
        return
    dist.barrier(pg)
    if pg.rank() == 0:
        dist.send(torch.ones(3), group=pg, group_dst=1)


def test_a_strided_tensor_is_received(pg: Any) -> None:
    if pg.size() < 2 or pg.rank() > 1:
        return
    if pg.rank() == 0:
        dist.send(torch.arange(6.0).reshape(2, 3).t(), group=pg, group_dst=1)
    else:
        tensor = torch.zeros(3, 4)[:, ::2]
        dist.recv(tensor, group=pg, group_src=0)
        assert torch.equal(tensor, torch.arange(6.0).reshape(2, 3).t())


def test_the_store(world: Any) -> None:
    store = world.get_group_store()
    store.set(f"key {dist.get_rank()}", "value")
    assert store.get(f"key {(dist.get_rank() + 1) % dist.get_world_size()}") == b"value"


def test_rendezvous_without_the_environment(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for url in ("env://", "mpicoll://"):
        store, rank, size = next(dist.rendezvous(url))
        assert (rank, size) == (MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size)
        store.set(str(rank), "here")
        store.wait([str(each) for each in range(size)], timedelta(seconds=10))
        MPI.COMM_WORLD.Barrier()


def test_rendezvous_with_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "5")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    assert rendezvous._lacking("env://")
    monkeypatch.setenv("MASTER_PORT", "1")
    assert not rendezvous._lacking("env://")
    monkeypatch.delenv("RANK")
    assert rendezvous._lacking("env://")
    assert not rendezvous._lacking("env://?rank=3")


def test_ranks_of_pytorch_are_not_those_of_mpi(world: Any) -> None:
    """As where the variables of a launcher number the processes otherwise."""
    rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    reverse, timeout = size - 1 - rank, timedelta(seconds=10)
    comm = group_communicators.communicator_of(None, reverse, size, "0", [], timeout)
    assert (comm.rank, comm.size) == (reverse, size)
    comm.Free()
    store = dist.PrefixStore("reverse ranks", world.get_group_store())
    comm = group_communicators.communicator_of(store, reverse, size, "1", list(range(size)), timeout)
    assert (comm.rank, comm.size) == (reverse, size)
    comm.Free()
    with pytest.raises(RuntimeError, match=rf"it has {size + 1} ranks, but MPI {size}; start the program with mpirun"):
        group_communicators.communicator_of(None, rank, size + 1, "0", [], timeout)
    if size > 1:
        with pytest.raises(RuntimeError, match="each once"):
            group_communicators.communicator_of(None, 0, size, "0", [], timeout)


def test_records_of_all_ranks() -> None:
    records = rendezvous.exchange_records(MPI.COMM_WORLD, f"rank {MPI.COMM_WORLD.rank}", 10)
    assert records == [f"rank {each}" for each in range(MPI.COMM_WORLD.size)]
