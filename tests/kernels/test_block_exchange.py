"""The exchange of blocks on simulated memory: no races in any interleaving, right results, damaged records refused."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from mpicoll.plans.simulated_memory import Memory, Race
from mpicoll.plans.simulated_modules import Edits, load_modules

MODULES = ("operation_words", "strided_copy", "process_copy", "exchange_words", "block_offers", "block_exchange")
CHUNK = 64
BUFFER_NBYTES = 8192
Layout = tuple[int, int, tuple[int, ...], tuple[int, ...]]
"""Address, run, shape, strides."""


def bytes_of(layout: Layout) -> np.ndarray:
    """Return the places of a layout's bytes, in order."""
    address, run, shape, strides = layout
    places = np.array([address])
    for count, stride in zip(shape, strides, strict=True):
        places = (places[:, None] + stride * np.arange(count)).ravel()
    return (places[:, None] + np.arange(run)).ravel()


def draw(numbers: random.Random, begin: int, nbytes: int) -> tuple[Layout, int]:
    """Return a layout of `nbytes` bytes from `begin` on, and the byte behind it."""
    if not nbytes:
        return (begin, 1, (), ()), begin
    divisors = [each for each in range(1, nbytes + 1) if nbytes % each == 0]
    run = numbers.choice(divisors)
    shape: list[int] = []
    left = nbytes // run
    while left > 1 and len(shape) < 3:
        count = left if len(shape) == 2 else numbers.choice([each for each in range(1, left + 1) if left % each == 0])
        shape.append(count)
        left //= count
    shape += [left] if left > 1 else []
    strides, width = [], run
    for count in shape:
        width += numbers.randrange(0, 9)
        strides.append(width)
        width *= count
    layout = (begin, run, tuple(reversed(shape)), tuple(reversed(strides)))
    if shape and numbers.random() < 0.3:  # the outermost dimension backwards
        last, step = shape[-1], strides[-1]
        layout = (begin + (last - 1) * step, run, layout[2], (-step, *layout[3][1:]))
    return layout, begin + max(width, run)


class Ranks:
    """Ranks with a send buffer in their segment, one in private memory, and a receive buffer."""

    def __init__(self, size: int, edits: Edits = None) -> None:
        self.size, self.memory, self.repeated = size, Memory(size, 3 << 20), 0
        modules = load_modules(self.memory, MODULES, edits)
        self.kernels, self.layouts, words = modules.block_exchange, modules.strided_copy, modules.operation_words
        self.offers, self.exchange_words = modules.block_offers, modules.exchange_words
        private, shared = self.memory.private, self.memory.shared
        peers = private(8 * words.PEER_WORDS * size)
        self.near, self.stages = [], []
        for rank in range(size):
            stage, near = shared(2 * size * CHUNK), shared(BUFFER_NBYTES)
            self.stages.append(stage)
            self.near.append(near)
            for word, value in enumerate((rank, stage, stage, near + BUFFER_NBYTES - stage, stage)):
                self.memory.store(peers + 8 * (words.PEER_WORDS * rank + word), value)
        self.far = [shared(BUFFER_NBYTES) for _ in range(size)]
        self.received = [shared(2 * BUFFER_NBYTES) for _ in range(size)]
        row, record = 8 * self.layouts.LAYOUT_WORDS * size, self.exchange_words.OFFER_NBYTES * size
        self.rows = [(private(row), private(row)) for _ in range(size)]
        self.records = [(private(record), private(record)) for _ in range(size)]
        self.words = [private(8 * self.exchange_words.ALL_WORDS) for _ in range(size)]
        for rank in range(size):
            for name, value in {
                "SIZE": size, "RANK": rank, "PEERS": peers, "SENDS": self.rows[rank][0], "RECVS": self.rows[rank][1],
                "OFFERS": self.records[rank][0], "ARRIVED": self.records[rank][1], "STAGE": self.stages[rank],
                "CHUNK": CHUNK, "MAY_DIRECT": 1, "MARK": 77, "TYPE": 3,
            }.items():  # fmt: skip
                self.put(rank, name, value)

    def put(self, rank: int, name: str, value: int) -> None:
        self.memory.store(self.words[rank] + 8 * getattr(self.exchange_words, name), value)

    def get(self, rank: int, name: str) -> int:
        return self.memory.load(self.words[rank] + 8 * getattr(self.exchange_words, name))

    def write_row(self, place: int, layout: Layout, nbytes: int) -> None:
        words = self.layouts
        address, run, shape, strides = layout
        values = {words.ADDRESS: address, words.NBYTES: nbytes, words.RUN: run, words.DIMENSIONS: len(shape)}
        values.update({words.SHAPE + number: count for number, count in enumerate(shape)})
        values.update({words.STRIDES + number: stride for number, stride in enumerate(strides)})
        for word, value in values.items():
            self.memory.store(place + 8 * word, value)

    def each(self, function: Any) -> list[Any]:
        """Let every rank do something, one after the other."""
        results = []
        for rank in range(self.size):
            self.memory.rank = rank
            results.append(function(rank))
        self.memory.rank = -1
        return results

    def meet(self) -> None:
        """Order everything before this, on all ranks, before everything after it."""
        clocks = self.memory._clocks
        clocks[:] = clocks.max(axis=0)
        clocks[np.diag_indices(self.size)] += 1

    def alltoall(self) -> None:
        nbytes, data = self.exchange_words.OFFER_NBYTES, self.memory.memory
        for rank in range(self.size):
            for other in range(self.size):
                source, target = self.records[other][0] + nbytes * rank, self.records[rank][1] + nbytes * other
                data[target : target + nbytes] = data[source : source + nbytes]
        self.meet()

    def attempt(self, barriers: bool) -> bool:
        """Exchange blocks; return whether the system has copied all between processes that it was asked to."""
        self.each(lambda rank: self.offers.offer_blocks(self.words[rank]))
        self.alltoall()
        self.each(lambda rank: self.kernels.take(self.words[rank]))
        rounds = set(self.each(lambda rank: self.get(rank, "ROUNDS")))
        assert len(rounds) == 1
        wrong = self.each(lambda rank: self.get(rank, "WRONG_RANK") >= 0 and self.get(rank, "WRONG_NBYTES"))
        assert set(wrong) <= {False, self.exchange_words.OUT_OF_REACH}
        for number in range(1, *rounds):
            self.each(lambda rank, number=number: self.put(rank, "ROUND", number))
            self.each(lambda rank: self.offers.offer_round(self.words[rank]))
            if barriers:
                self.meet()
            self.each(lambda rank: self.kernels.take_round(self.words[rank]))
        if rounds != {0}:
            self.meet()
        self.repeated += any(wrong)
        return not any(wrong)

    def exchange(self, seed: object, *, barriers: bool = True) -> None:
        """Exchange blocks of drawn lengths and layouts twice from one memory, and check every byte."""
        numbers = random.Random(str(seed))
        longest = numbers.choice((60, 900, 900))
        counts = [[numbers.randrange(longest) for _ in range(self.size)] for _ in range(self.size)]
        sends, recvs, bases = {}, {}, []
        for rank in range(self.size):
            bases.append(numbers.choice((self.near, self.far))[rank])
            end = 0
            for other in range(self.size):
                sends[rank, other], end = draw(numbers, end, counts[rank][other])
                if end > BUFFER_NBYTES:
                    return
            end = 0
            for other in range(self.size):
                recvs[rank, other], end = draw(numbers, end, counts[other][rank])
            if end > 2 * BUFFER_NBYTES:
                return
            self.put(rank, "SEND_BASE", bases[rank])
            self.put(rank, "RECV_BASE", self.received[rank])
            self.put(rank, "SHORTEST_RUN", numbers.choice((0, 0, 1, 40)))
            for other in range(self.size):
                step = 8 * self.layouts.LAYOUT_WORDS * other
                self.write_row(self.rows[rank][0] + step, sends[rank, other], counts[rank][other])
                self.write_row(self.rows[rank][1] + step, recvs[rank, other], counts[other][rank])
        data = np.random.default_rng(list(str(seed).encode())).integers(0, 256, (self.size, BUFFER_NBYTES), np.uint8)
        self.each(lambda rank: self.memory.write(bases[rank], data[rank]))
        if not self.attempt(barriers):
            self.each(lambda rank: self.put(rank, "SHORTEST_RUN", 0))
            assert self.attempt(barriers)
        for rank in range(self.size):
            got = self.memory.memory[self.received[rank] :]
            for other in range(self.size):
                expected = data[other][bytes_of(sends[other, rank])] if counts[other][rank] else []
                places = bytes_of(recvs[rank, other])[: counts[other][rank]]
                np.testing.assert_array_equal(got[places], expected)


def exchange_often(ranks: Ranks, seed: object, *, barriers: bool = True) -> None:
    for number in range(100):
        ranks.exchange((seed, number), barriers=barriers)


@pytest.mark.parametrize("size", [2, 3])
def test_blocks_that_the_system_does_not_copy_are_staged(size: int) -> None:
    ranks = Ranks(size)
    ranks.memory.hidden.add(size - 1)
    exchange_often(ranks, ("hidden", size))
    assert ranks.repeated


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_no_interleaving_has_a_race(size: int) -> None:
    exchange_often(Ranks(size), size)


PLANTED = {
    "one half": ("block_offers", "(number & 1) * load(words + 8 * SIZE)\n", "0 * load(words + 8 * SIZE)\n"),
    "one stage for all": ("block_offers", "(half + rank) * load(words + 8 * CHUNK)", "half * load(words + 8 * CHUNK)"),
    "the first part again": ("block_offers", "number * load(words + 8 * CHUNK), nbytes)", "0, nbytes)"),
    "a layout of its own": (
        "block_exchange",
        "seek(source, layout, peer_of",
        "seek(source, layout_for(words, RECVS, rank), peer_of",
    ),
    "pieces that are not there": ("block_exchange", "seek(source, layout, 0, 0)", "seek(source, layout, 0, 1)"),
    "neighbours that are none": ("process_copy", "load(last) + load(last + 8) == address", "True"),
    "one list for both": ("process_copy", "remote = vectors + 16 * PIECES", "remote = vectors"),
}


@pytest.mark.parametrize("planted", PLANTED)
def test_planted_errors_are_found(planted: str) -> None:
    module, old, new = PLANTED[planted]
    ranks = Ranks(3, {module: (old, new)})
    with pytest.raises((Race, AssertionError, IndexError)):
        exchange_often(ranks, planted)


def test_a_missing_barrier_is_found() -> None:
    with pytest.raises(Race):
        exchange_often(Ranks(2), "barrier", barriers=False)


CHECKS = {
    "as it is": ("", ""),
    "no check of layouts": ("if not is_inside(words, rank, low, high):", "if False:"),
    "no check of stages": ("if not is_inside(words, rank, place, place + here):", "if False:"),
}


@pytest.mark.parametrize("checks", CHECKS)
def test_damaged_records_never_lead_outside_the_senders_segment(checks: str) -> None:
    ranks, numbers, refused = Ranks(2, {"block_exchange": CHECKS[checks]}), random.Random(5), 0
    segment = ranks.stages[1], ranks.near[1] + BUFFER_NBYTES
    own = ((ranks.stages[0], ranks.near[0] + BUFFER_NBYTES), (ranks.far[0], ranks.far[0] + BUFFER_NBYTES))
    outside = 0
    for _ in range(1500):
        offer_equal_blocks(ranks, numbers.choice((100, 448, 449, 700)), numbers.choice((ranks.near, ranks.far)))
        damage(ranks, numbers)
        ranks.memory.made[0].clear()
        ranks.memory.rank = 0
        try:
            ranks.kernels.take(ranks.words[0])
        except (AssertionError, ValueError, IndexError, OverflowError):
            outside += 1
        ranks.memory.rank = -1
        refused += ranks.get(0, "WRONG_RANK") == 1
        for what, address, length in ranks.memory.made[0]:
            if what == "read" and not any(low <= address < high for low, high in own):
                outside += not (segment[0] <= address and address + length <= segment[1])
        ranks.meet()
    assert 0 < refused < 1400
    assert (outside == 0) == (checks == "as it is")


def offer_equal_blocks(ranks: Ranks, nbytes: int, bases: list[int]) -> None:
    """Let every rank offer contiguous blocks of one length, and give the records to all."""
    for rank in range(ranks.size):
        for other in range(ranks.size):
            for row in ranks.rows[rank]:
                ranks.write_row(row + 8 * ranks.layouts.LAYOUT_WORDS * other, (0, nbytes, (), ()), nbytes)
        ranks.put(rank, "SEND_BASE", bases[rank])
        ranks.put(rank, "RECV_BASE", ranks.received[rank])
    ranks.each(lambda rank: ranks.offers.offer_blocks(ranks.words[rank]))
    ranks.alltoall()


def damage(ranks: Ranks, numbers: random.Random) -> None:
    """Change some words of the record that rank 0 has from rank 1."""
    record = ranks.records[0][1] + ranks.exchange_words.OFFER_NBYTES
    for _ in range(numbers.randrange(1, 4)):
        place = record + 8 * numbers.choice((2, 4, 4, *range(5, 12), 20, 21))
        value = numbers.choice((0, 1, 2, -1, 13, 1 << 40, -(1 << 62), numbers.randrange(-1000, 1000), 700))
        near = ranks.memory.load(place) + numbers.randrange(-64, 64)
        ranks.memory.store(place, numbers.choice((value, near)))
