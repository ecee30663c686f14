"""Announcements on shared memory, in every order of the ranks' steps."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest

from mpicoll.kernels.announce import LINE_NBYTES
from mpicoll.kernels.decorators import DISABLED
from mpicoll.shared_memory.announcements import Announcements, lines_nbytes

pytestmark = pytest.mark.skipif(DISABLED, reason="shared memory needs compiled kernels")

ROUNDS = 4


class Rank(NamedTuple):
    """Position of a rank: the round that it is in, and whether it has started it, and has seen that it is complete."""

    round: int = 1
    started: bool = False
    complete: bool = False


class WrongNumbers(Exception):
    """A rank has read other numbers than the ranks have told in its round."""


class WaitForEver(Exception):
    """No rank can make a step any more."""


def given(rank: int, number: int) -> list[int]:
    return [1000 * number + rank, -number, rank, 3, 0, number]


def step(memory: np.ndarray, ranks: tuple[Rank, ...], rank: int, *, waits: bool = True) -> Rank:
    """Let a rank make its next step; return where it is then."""
    now = ranks[rank]
    own = Announcements(memory.ctypes.data, len(ranks), rank, 1)
    own._round = now.round - (not now.started)
    if not now.started:
        return Rank(now.round, True, own.start(*given(rank, now.round)) or not waits)
    own._own[:] = given(rank, now.round)
    if not now.complete:
        return Rank(now.round, True, own.is_complete())
    if waits and own.told.tolist() != [given(other, now.round) for other in range(len(ranks))]:
        raise WrongNumbers(f"rank {rank} in round {now.round}: {own.told.tolist()}")
    return Rank(now.round + 1)


def explore(size: int, careless: int = -1) -> int:
    """Make the ranks' steps in every order; return how many states there are. A `careless` rank waits for nobody."""
    first = bytes(LINE_NBYTES * size), (Rank(),) * size
    seen, rest = {first}, [first]
    while rest:
        content, ranks = rest.pop()
        followers: dict[tuple[bytes, tuple[Rank, ...]], bool] = {}  # in the same order in every run
        for rank in range(size):
            if ranks[rank].round <= ROUNDS:
                memory = np.frombuffer(bytearray(content), np.int64)
                moved = step(memory, ranks, rank, waits=rank != careless)
                followers[memory.tobytes(), (*ranks[:rank], moved, *ranks[rank + 1 :])] = True
        if list(followers) == [(content, ranks)]:
            raise WaitForEver(ranks)
        rest += [each for each in followers if each not in seen]
        seen.update(followers)
    return len(seen)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_rank_reads_the_numbers_of_its_round(size: int) -> None:
    assert explore(size) > 3**size


def test_a_rank_that_does_not_wait_is_found() -> None:
    """It overwrites numbers that others have not read, or wait for."""
    with pytest.raises((WrongNumbers, WaitForEver)):
        explore(2, careless=0)


def test_missing_ranks_are_named() -> None:
    memory = np.zeros(LINE_NBYTES // 8 * 3, np.int64)
    ranks = [Announcements(memory.ctypes.data, 3, rank, 1) for rank in range(3)]
    assert not ranks[1].start(5)
    assert ranks[1].missing() == [0, 2]
    assert not ranks[2].start(6)
    assert ranks[0].start(-(1 << 63), 7)
    assert [each.told.tolist() for each in ranks] == [
        [[-(1 << 63), 7, 0, 0, 0, 0], [5, 0, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0]]
    ] * 3


def test_lines_take_whole_pages() -> None:
    assert [lines_nbytes(size) for size in (1, 32, 33)] == [4096, 4096, 8192]
