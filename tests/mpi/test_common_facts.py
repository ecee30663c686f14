"""Communicators of the program's own whose ranks have met before: the facts of that meeting hold for them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from mpi4py import MPI

import mpicoll
from mpicoll.communicator import channel_cache, common_facts

WORLD = MPI.COMM_WORLD


@pytest.fixture(autouse=True)
def no_meetings() -> Iterator[None]:
    common_facts.forget_all()
    yield
    common_facts.forget_all()


@pytest.fixture
def meetings(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the communicators whose ranks have met."""
    sizes: list[int] = []
    meet = channel_cache.meet_on_nodes

    def noted(comm: MPI.Intracomm) -> object:
        sizes.append(comm.size)
        return meet(comm)

    monkeypatch.setattr(channel_cache, "meet_on_nodes", noted)
    return sizes


def _use(plain: MPI.Intracomm) -> mpicoll.Intracomm:
    """Make a communicator of ours, check long and short sums on it, and free the plain one."""
    comm = mpicoll.Intracomm(plain, timeout=20.0)
    for count in (3, 100_000):
        x = np.arange(count) * (comm.rank + 1)
        comm.Allreduce(MPI.IN_PLACE, x)
        assert np.array_equal(x, np.arange(count) * comm.size * (comm.size + 1) // 2)
    assert comm.allgather(comm.rank) == list(range(comm.size))
    plain.Free()
    return comm


def _several() -> None:
    if WORLD.size == 1:
        pytest.skip("one rank meets nobody")


@pytest.mark.parametrize("freed_first", [True, False])
def test_ranks_meet_once(meetings: list[int], freed_first: bool) -> None:
    _several()
    first = WORLD.Dup()
    if freed_first:
        _use(first)
    else:
        mpicoll.Intracomm(first).Barrier()
    for _ in range(3):
        _use(WORLD.Dup())
    assert meetings == [WORLD.size]
    if not freed_first:
        _use(first)


def test_some_of_them_in_another_order(meetings: list[int]) -> None:
    _several()
    mpicoll.Intracomm(WORLD.Dup()).Barrier()
    for colour in (WORLD.rank % 2, WORLD.rank * 3 // WORLD.size, 0):
        _use(WORLD.Split(colour, -WORLD.rank))
    assert meetings == [WORLD.size]


def test_more_ranks_meet_anew(meetings: list[int]) -> None:
    if WORLD.size < 3:
        pytest.skip("no part has several ranks")
    part = WORLD.Split(int(WORLD.rank > 0))
    size = part.size
    _use(part)
    _use(WORLD.Dup())
    assert [each for each in meetings if each > 1] == [size] * (size > 1) + [WORLD.size]


def test_a_rank_that_does_not_know_meets_all_others(meetings: list[int]) -> None:
    _several()
    _use(WORLD.Dup())
    if WORLD.rank == WORLD.size - 1:
        common_facts.forget_all()
    _use(WORLD.Dup())
    _use(WORLD.Dup())
    assert meetings == [WORLD.size] * 2


def test_ranks_that_know_different_meetings(meetings: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    _several()
    _use(WORLD.Dup())
    kept = common_facts._meetings.copy()
    monkeypatch.setenv("MPICOLL_CORES", "1")
    _use(WORLD.Dup())
    monkeypatch.delenv("MPICOLL_CORES")
    if WORLD.rank == 0:
        common_facts._meetings.clear()
        common_facts._meetings.extend(kept)
    else:
        common_facts.forget_all()
        _use_alone_in_turn()
    _use(WORLD.Dup())
    assert meetings[-1] == WORLD.size


def _use_alone_in_turn() -> None:
    _use(MPI.COMM_SELF.Dup())


@pytest.mark.parametrize(
    ("variable", "value"),
    [("MPICOLL_NODE", "off"), ("MPICOLL_NODES", "1"), ("MPICOLL_CHECK", "full"), ("MPICOLL_TRANSFER", "off")],
)
def test_settings_that_have_changed(
    meetings: list[int], monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    _several()
    usual = _facts()
    monkeypatch.setenv(variable, value)
    changed = _facts()
    assert changed != usual
    monkeypatch.delenv(variable)
    assert _facts() == usual
    assert meetings == [WORLD.size] * 2


def _facts() -> tuple[object, ...]:
    plain = WORLD.Dup()
    channel = mpicoll.Intracomm(plain, timeout=20.0).channel
    node = channel.node
    facts = channel.check, channel.polls, channel.is_alone, node is not None and node.reach
    _use(plain)
    return facts


def test_nodes_are_known(meetings: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Communicators over several nodes, and inside one, after a meeting of all."""
    _several()
    monkeypatch.setenv("MPICOLL_NODES", "2")
    _use(WORLD.Dup())
    for colour, nodes in ((0, -(-WORLD.size // 2)), (WORLD.rank // 2, 1)):
        plain = WORLD.Split(colour, -WORLD.rank)
        channel = mpicoll.Intracomm(plain, timeout=20.0).channel
        assert len(set(channel.node_ids.tolist())) == nodes
        assert channel.is_alone == (nodes > 1)
        _use(plain)
    assert meetings == [WORLD.size]


def test_a_tuning_table_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    _several()
    first = WORLD.Dup()
    comm = mpicoll.Intracomm(first)
    comm.Allreduce(np.ones(3), np.ones(3), algorithm="ring")
    assert comm.channel.tables is not None or comm.channel.rules is None
    second = WORLD.Dup()
    assert mpicoll.Intracomm(second).channel.tables is comm.channel.tables
    _use(second)
    _use(first)
