"""Compressed pulls: replicas that follow deltas have the published bits, and what is damaged is refused."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from mpicoll.compression import Compressor, compressor
from mpicoll.errors import CorruptPayload
from mpicoll.parameter_server.compressed_pulls import DeltaFollower, DeltaPublisher
from mpicoll.parameter_server.remote_memory import Region, word_at
from mpicoll.parameter_server.shard_memory import HEADER_NBYTES, Places

COUNT, BOUNDS = 1001, (250, 1251)
SPECS = ("int8", "int4:block=32", "fp16", "sign", "topk:0.05", "error:0.001")


class Memory(Region):
    """Memory of one process; `before_read` is called before each read, as if another rank came in between."""

    def __init__(self, nbytes: int) -> None:
        self.local = np.zeros(nbytes // 8 + 1, np.int64).view(np.uint8)
        self.before_read: Callable[[int], None] = lambda offset: None

    def _at(self, offset: int, like: np.ndarray) -> np.ndarray:
        return self.local[offset : offset + like.nbytes].view(like.dtype)

    def read(self, offset: int, out: np.ndarray) -> None:
        self.before_read(offset)
        out[:] = self._at(offset, out)

    def replace(self, offset: int, values: np.ndarray) -> None:
        self._at(offset, values)[:] = values

    def add(self, offset: int, values: np.ndarray) -> None:
        raise NotImplementedError

    def fetch_add(self, offset: int, value: int) -> int:
        raise NotImplementedError

    def decide(self, offset: int, value: int) -> int:
        raise NotImplementedError

    def put(self, offset: int, *parts: np.ndarray) -> None:
        raise NotImplementedError

    def refresh(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


class Pair:
    """A publisher, and followers in the same memory."""

    def __init__(self, spec: str | Compressor, version: int = 0) -> None:
        self.codec = compressor(spec).part(*BOUNDS)
        self.places = Places(2, COUNT, 4, 2, 4 * COUNT, self.codec.wire_nbytes(COUNT))
        self.memory = Memory(self.places.nbytes)
        self.random = np.random.default_rng(3)
        self.parameters = self.random.standard_normal(COUNT).astype(np.float32)
        self.initial = self.parameters.copy()
        self.publisher = DeltaPublisher(self.memory, self.places, self.codec, BOUNDS, self.parameters.copy(), version)
        self.version = version

    def follower(self, start: np.ndarray | None = None) -> DeltaFollower:
        start = self.initial if start is None else start
        return DeltaFollower(self.memory, self.places, self.codec, BOUNDS, start)

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            self.parameters += self.random.standard_normal(COUNT).astype(np.float32) * np.float32(0.1)
            self.version += 1
            self.publisher.publish(self.parameters, self.version)

    @property
    def number(self) -> int:
        return int(self.memory.local[: 8 * Places.FIRST].view(np.int64)[Places.DELTAS])

    def damage(self, number: int, offset: int) -> None:
        self.memory.local[self.places.delta(number) + offset] ^= 4


def equal(first: np.ndarray, second: np.ndarray) -> bool:
    return np.array_equal(first.view(np.uint32), second.view(np.uint32))


@pytest.mark.parametrize("spec", SPECS)
def test_a_replica_has_the_published_bits(spec: str) -> None:
    """Two followers read at different times, one of them often too late for the ring."""
    pair = Pair(spec, version=5)
    often, seldom, wholes = pair.follower(), pair.follower(), 0
    for turn in range(60):
        pair.step(1 + turn % 3)
        for follower in (often, seldom)[: 1 + (turn % 7 == 6)]:
            if not follower.catch_up(pair.number):
                wholes += 1
                follower.restore(pair.publisher.whole())
            assert equal(follower.parameters, pair.publisher.published)
            assert follower.version == pair.version
    assert wholes >= (0 if pair.places.reach > 20 else 8)


@pytest.mark.parametrize("spec", SPECS)
def test_what_a_delta_lacks_is_part_of_later_ones(spec: str) -> None:
    """The parameters stand still: the published ones come to them, as far as the compressor goes."""
    pair = Pair(spec)
    pair.step(5)
    off = np.linalg.norm(pair.parameters - pair.publisher.published)
    for _ in range(60):
        pair.publisher.publish(pair.parameters, pair.version)
    last = np.linalg.norm(pair.parameters - pair.publisher.published)
    assert last == 0 if spec == "topk:0.05" else last < max(0.5 * off, 0.05)


def test_who_begins_with_the_servers_parameters_does_not_read_them() -> None:
    pair = Pair("topk:0.05", version=7)
    same, other = pair.follower(), pair.follower(np.nextafter(pair.initial, np.float32(9)))
    assert same.catch_up(0)
    assert same.version == 7
    assert same.read_nbytes == 0
    assert not other.catch_up(0)
    other.restore(pair.publisher.whole())
    assert other.catch_up(0)
    assert equal(other.parameters, same.parameters)
    assert other.read_nbytes == HEADER_NBYTES + 4 * COUNT


def test_who_is_too_far_behind_reads_all_parameters() -> None:
    pair = Pair("topk:0.05")
    reach = pair.places.reach
    assert reach * pair.codec.wire_nbytes(COUNT) <= 4 * COUNT
    behind, further = pair.follower(), pair.follower()
    pair.step(reach)
    assert behind.catch_up(pair.number)
    pair.step()
    assert not further.catch_up(pair.number)
    assert behind.catch_up(pair.number)


def test_a_delta_that_is_overwritten_while_it_is_read_is_not_applied() -> None:
    """The server is one turn of the ring further when the payload is read."""
    pair = Pair("int8")
    follower = pair.follower()
    pair.step()
    before = follower.parameters.copy()

    def overtake(offset: int) -> None:
        if offset == pair.places.delta(0) + HEADER_NBYTES:
            pair.memory.before_read = lambda offset: None
            pair.step(pair.places.deltas)

    pair.memory.before_read = overtake
    assert not follower.catch_up(1)
    assert equal(follower.parameters, before)
    follower.restore(pair.publisher.whole())
    assert equal(follower.parameters, pair.publisher.published)


def test_a_delta_that_is_being_overwritten_is_not_damaged() -> None:
    """Half of the next delta in the slot is there, and the number before it is published."""
    pair = Pair("int8")
    follower = pair.follower()
    pair.step()

    def overtake(offset: int) -> None:
        if offset == pair.places.delta(0) + HEADER_NBYTES:
            pair.memory.before_read = lambda offset: None
            pair.step(pair.places.deltas)  # the last of them lies in the slot of the first
            pair.memory.replace(word_at(Places.DELTAS), np.array([pair.places.deltas], np.int64))

    pair.memory.before_read = overtake
    assert not follower.catch_up(1)


@pytest.mark.parametrize("field", range(8))
def test_a_damaged_header_is_refused(field: int) -> None:
    pair = Pair("topk:0.05")
    follower = pair.follower()
    pair.step(2)
    assert follower.catch_up(1)
    before = follower.parameters.copy()
    for value in (-1, 1 << 62):
        words = pair.memory.local[pair.places.delta(1) :][:HEADER_NBYTES].view(np.int64)
        good, words[field] = words[field], value
        with pytest.raises(CorruptPayload, match="message 1 of the server's deltas"):
            follower.catch_up(2)
        words[field] = good
    assert equal(follower.parameters, before)
    assert follower.catch_up(2)
    assert equal(follower.parameters, pair.publisher.published)


def test_a_damaged_payload_is_refused() -> None:
    pair = Pair("int8")
    follower = pair.follower()
    pair.step()
    pair.damage(0, HEADER_NBYTES + 13)
    with pytest.raises(CorruptPayload, match="checksum"):
        follower.catch_up(1)
    assert equal(follower.parameters, pair.initial)


def test_numbers_that_go_back_are_refused() -> None:
    pair = Pair("int8")
    follower, old = pair.follower(), pair.publisher.whole()
    pair.step(2)
    assert follower.catch_up(2)
    with pytest.raises(CorruptPayload, match="1 deltas are published, 2 were read"):
        follower.catch_up(1)
    with pytest.raises(CorruptPayload, match="does not follow"):
        follower.restore(old)


@pytest.mark.parametrize("place", [0, 8, 32, 56, HEADER_NBYTES, HEADER_NBYTES + 4 * COUNT - 1])
def test_damaged_parameters_are_refused(place: int) -> None:
    pair = Pair("int8")
    follower = pair.follower(np.zeros(COUNT, np.float32))
    assert not follower.catch_up(0)
    message = pair.publisher.whole()
    message[place] ^= 8
    with pytest.raises(CorruptPayload, match="all published parameters"):
        follower.restore(message)
    assert not follower.parameters.any()


def test_parameters_that_diverge_are_published() -> None:
    pair = Pair("topk:0.05")
    follower = pair.follower()
    for value in (np.inf, np.nan):
        pair.parameters[3] = value
        pair.publisher.publish(pair.parameters, 1)
    for _ in range(30):
        pair.publisher.publish(pair.parameters, 1)
    follower.restore(pair.publisher.whole())
    assert not np.isfinite(follower.parameters[3])
