"""The verifier of plans of messages and codecs: two-shot plans are right, and planted errors are found."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mpicoll.collectives.two_shot import TwoShot, shard_bounds
from mpicoll.compression import ErrorFeedback, compressor
from mpicoll.kernels import decorators
from mpicoll.kernels.codecs import codec_kernels
from mpicoll.messages.calls import Call
from mpicoll.messages.codec_calls import CompressedChunk, Decode, Encode
from mpicoll.messages.lowering import Phase
from mpicoll.messages.verify_phases import Content, Piece, PlanError, verify_phases

pytestmark = pytest.mark.skipif(decorators.DISABLED, reason="instructions have addresses of compiled code")
SIZES = (1, 2, 3, 4, 5, 8, 17)


class Plans:
    """The two-shot plans of all ranks for vectors of `count` elements, without a communicator."""

    def __init__(self, spec: Any, size: int, count: int, *, in_place: bool = False) -> None:
        self.size, self.count = size, count
        self.x = [np.empty(count, np.float32) for _ in range(size)]
        self.y = self.x if in_place else [np.empty(count, np.float32) for _ in range(size)]
        self.compression: list[Any] = []
        self.shots = [self._shot(rank, spec) for rank in range(size)]
        self.phases = [list(shot.stages()) for shot in self.shots]

    def _shot(self, rank: int, spec: Any) -> TwoShot:
        channel: Any = SimpleNamespace(
            rank=rank, size=self.size, identity=rank, compression_counter=np.zeros(1, np.int64)
        )
        made = ErrorFeedback(spec[1]) if isinstance(spec, tuple) else compressor(spec)
        self.compression.append(made)  # plans do not keep error feedback
        return TwoShot(channel, made, self.x[rank], self.y[rank], np.empty)

    def verify(self) -> list[list[Content]]:
        return verify_phases(self.phases, [{"x": x} for x in self.x], self.y)

    def change(self, rank: int, phase: int, calls: list[Call]) -> None:
        self.phases[rank][phase] = self.phases[rank][phase]._replace(calls=tuple(calls))

    def calls(self, rank: int, phase: int) -> list[Call]:
        return list(self.phases[rank][phase].calls)


def expected(plans: Plans, spec: str) -> list[Any]:
    """Return what every rank shall hold: for each shard the decoded payload of the sum of all decoded payloads."""
    codec = compressor(spec).codec
    assert codec is not None
    encode, decode = codec_kernels.address_of(codec.encode), codec_kernels.address_of(codec.decode)
    bounds, shards = shard_bounds(plans.count, plans.size, compressor(spec).granularity), []
    for start, stop in pairwise(bounds):
        if start == stop:
            continue
        total: Any = None
        for rank in range(plans.size):
            given: Any = ("x", rank)
            if (start, stop) != (0, plans.count):
                given = Piece(given, 4 * start, 4 * stop)
            payload = ("encoded", encode, given)
            total = ("decoded", decode, payload) if rank == 0 else ("decoded", decode, total, payload)
        shards.append(("decoded", decode, ("encoded", encode, total)))
    return shards


@pytest.mark.parametrize("spec", ["int8:block=32", "error:1e-3:block=32", "natural:32"])
@pytest.mark.parametrize("in_place", [False, True])
def test_every_rank_holds_the_sum_of_all_contributions(spec: str, in_place: bool) -> None:
    for size in SIZES:
        for count in (1, 31, 32, 33, 200, 1000):
            plans = Plans(spec, size, count, in_place=in_place)
            wanted = expected(plans, spec)
            for contents in plans.verify():
                assert [each.held for each in contents] == wanted, (size, count)


@pytest.mark.parametrize("spec", ["sign:32", "error:1e-3:block=32"])
def test_with_error_feedback_all_ranks_hold_the_same(spec: str) -> None:
    for size in SIZES:
        first, *others = (
            [each.held for each in contents] for contents in Plans(("feedback", spec), size, 300).verify()
        )
        assert all(other == first for other in others)
        assert all(f"('x', {rank})" in str(first[0]) for rank in range(size))


def test_a_payload_that_is_decoded_before_it_has_arrived_is_found() -> None:
    plans = Plans("int8:block=32", 4, 300)
    compress, reduce = plans.calls(2, 0), plans.calls(2, 1)
    plans.change(2, 0, compress + reduce[:2])
    with pytest.raises(PlanError, match="rank 2, phase 0: reads 72 bytes, of which nobody has written some"):
        plans.verify()


def test_a_missing_wait_is_found() -> None:
    plans = Plans("int8:block=32", 3, 300)
    plans.phases[1][1] = plans.phases[1][1]._replace(waits_for=None)
    with pytest.raises(PlanError, match="rank 1, phase 1: reads"):
        plans.verify()


def test_a_payload_that_is_overwritten_while_it_is_sent_is_found() -> None:
    plans = Plans("int8:block=32", 3, 300)
    shot = plans.shots[0]
    late = Phase(None, (Encode(plans.x[0][:96], shot._outgoing[1], shot._keys, 0, 0),), None)
    plans.phases[0].insert(1, late)
    with pytest.raises(PlanError, match="rank 0, phase 1: writes memory that is being sent"):
        plans.verify()


def test_memory_that_two_payloads_share_is_found() -> None:
    plans = Plans("int8:block=32", 3, 300)
    shot = plans.shots[0]
    shot._incoming[1] = shot._incoming[2]
    plans.phases[0] = list(shot.stages())
    with pytest.raises(PlanError, match="rank 0, phase 0: writes memory that is being received"):
        plans.verify()


def test_a_lost_contribution_is_found() -> None:
    plans = Plans("int8:block=32", 3, 300)
    calls = plans.calls(1, 1)
    adding = calls[1]
    assert isinstance(adding, Decode)
    calls[1] = Decode(adding.source, adding.out, add=False)
    plans.change(1, 1, calls)
    wanted = expected(plans, "int8:block=32")
    assert all([each.held for each in contents] != wanted for contents in plans.verify())


def test_too_little_room_for_a_payload_is_found() -> None:
    plans = Plans("int8:block=32", 2, 300)
    shot = plans.shots[1]
    shot._incoming[0] = CompressedChunk(compressor("int8:block=32"), 32, np.empty)
    plans.phases[1] = list(shot.stages())
    with pytest.raises(PlanError, match="rank 1, phase 1: has room for 36 bytes from rank 0, which sends 180"):
        plans.verify()


def test_ranks_that_wait_for_ever_are_found() -> None:
    plans = Plans("int8:block=32", 2, 300)
    messages = plans.phases[0][0].messages
    assert messages is not None
    plans.phases[0][0] = plans.phases[0][0]._replace(messages=tuple(each for each in messages if not each.is_send))
    with pytest.raises(PlanError, match="ranks 0, 1 wait for messages that nobody sends"):
        plans.verify()
