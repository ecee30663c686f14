"""The verifier of plans of messages and codecs: sparse allreduces are right, and planted errors are found."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise, product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mpicoll.collectives.sparse_allreduce import SparseAllreduce
from mpicoll.compression import ErrorFeedback, Key, Sparsifier, compressor
from mpicoll.kernels import decorators
from mpicoll.kernels.codecs import codec_kernels, sparse_codec
from mpicoll.messages.calls import Call, KernelCall, MovablePart
from mpicoll.messages.codec_calls import Decode, Encode
from mpicoll.messages.lowering import Message
from mpicoll.messages.sparse_memory import SparsePayload
from mpicoll.messages.verify_phases import Content, PlanError, verify_phases
from mpicoll.schedules import chunk_bounds

pytestmark = pytest.mark.skipif(decorators.DISABLED, reason="instructions have addresses of compiled code")
SIZES = (1, 2, 3, 4, 5, 8, 17)
GATHERED, SPLIT = "topk:k=1", "topk:0.5"
COUNTS = {GATHERED: 1000, SPLIT: 300}


@dataclass(frozen=True)
class FromPython(Sparsifier):
    """A sparsifier of a user's: the first elements."""

    def capacity(self, count: int) -> int:
        return (count + 1) // 2

    def select(self, x: np.ndarray, key: Key, indices: np.ndarray, values: np.ndarray) -> int:
        indices[:], values[:] = np.arange(indices.size), x[: indices.size]
        return indices.size


class Plans:
    """The plans of all ranks for vectors of `count` elements, without a communicator."""

    def __init__(self, spec: Any, size: int, count: int, *, in_place: bool = False, feedback: bool = False) -> None:
        self.size, self.count, self.feedback = size, count, feedback
        self.x = [np.empty(count, np.float32) for _ in range(size)]
        self.y = self.x if in_place else [np.empty(count, np.float32) for _ in range(size)]
        self.phases = [list(self._stages(rank, compressor(spec))) for rank in range(size)]

    def _stages(self, rank: int, sparsifier: Any) -> Any:
        channel: Any = SimpleNamespace(
            rank=rank, size=self.size, identity=rank, compression_counter=np.zeros(1, np.int64)
        )
        feedback = ErrorFeedback(sparsifier) if self.feedback else None
        return SparseAllreduce(channel, sparsifier, feedback, self.x[rank], self.y[rank], np.empty).stages()

    def verify(self) -> list[list[Content]]:
        return verify_phases(self.phases, [{"x": x} for x in self.x], self.y)

    def results(self) -> list[list[Any]]:
        return [[each.held for each in contents] for contents in self.verify()]

    def calls(self, rank: int, phase: int) -> list[Call]:
        return list(self.phases[rank][phase].calls)

    def change(self, rank: int, phase: int, **changes: Any) -> None:
        self.phases[rank][phase] = self.phases[rank][phase]._replace(**changes)

    def messages(self, rank: int, phase: int) -> list[Message]:
        found = self.phases[rank][phase].messages
        assert found is not None
        return list(found)


def address(kernel: Any) -> int:
    return codec_kernels.address_of(kernel)


def payload_of(entries: Any, first: int, length: int) -> Any:
    return ("encoded", address(sparse_codec.encode), first, length, entries)


def sent_by(rank: int, first: int, length: int) -> Any:
    return payload_of(("encoded", address(sparse_codec.largest), ("x", rank)), first, length)


def sum_of(payloads: list[Any]) -> Any:
    total: Any = ("decoded", address(sparse_codec.decode), payloads[0])
    for payload in payloads[1:]:
        total = ("decoded", address(sparse_codec.decode), total, payload)
    return total


def expected(plans: Plans, spec: str) -> list[Any]:
    """Return what every rank shall hold: the sum of all payloads; or by region, the decoded payload of that sum."""
    if plans.size <= 2 or spec == GATHERED:
        return [sum_of([sent_by(rank, 0, plans.count) for rank in range(plans.size)])]
    regions = []
    for first, stop in pairwise(chunk_bounds(plans.count, plans.size)):
        total = sum_of([sent_by(rank, first, stop - first) for rank in range(plans.size)])
        entries = ("encoded", address(sparse_codec.not_zero), total)
        regions.append(sum_of([payload_of(entries, 0, stop - first)]))
    return regions


@pytest.mark.parametrize("spec", [GATHERED, SPLIT])
@pytest.mark.parametrize("in_place", [False, True])
def test_every_rank_holds_the_sum_of_all_entries(spec: str, in_place: bool) -> None:
    for size in SIZES:
        plans = Plans(spec, size, COUNTS[spec], in_place=in_place)
        wanted = expected(plans, spec)
        assert all(held == wanted for held in plans.results()), size


@pytest.mark.parametrize(
    ("spec", "feedback"),
    [*product([GATHERED, SPLIT, "sampled:0.3"], [False, True]), ("wangni:0.3", False)],
)
def test_all_ranks_hold_the_same(spec: str, feedback: bool) -> None:
    for size in SIZES:
        first, *others = Plans(spec, size, 300, feedback=feedback).results()
        assert all(other == first for other in others)
        assert all(f"('x', {rank})" in str(first[0]) for rank in range(size))


def test_only_what_a_user_selects_is_done_by_the_interpreter() -> None:
    for feedback in (False, True):
        plans = Plans(FromPython(), 3, 300, feedback=feedback)
        calls = [call for phase in plans.phases[1] for call in phase.calls]
        by_python = [call for call in calls if call.instruction() is None]
        assert len(by_python) == (4 if feedback else 1), by_python
        assert isinstance(by_python[feedback], Encode)


@pytest.mark.parametrize(("spec", "phase"), [(GATHERED, 1), (SPLIT, 1), (SPLIT, 2)])
def test_a_missing_wait_is_found(spec: str, phase: int) -> None:
    plans = Plans(spec, 4, COUNTS[spec])
    plans.change(1, phase, waits_for=None)
    with pytest.raises(PlanError, match=f"rank 1, phase {phase}: reads .* nobody has written some"):
        plans.verify()


@pytest.mark.parametrize(("spec", "phase"), [(GATHERED, 0), (SPLIT, 0), (SPLIT, 1)])
def test_a_length_that_is_sent_before_it_is_written_is_found(spec: str, phase: int) -> None:
    """The length of a payload stands in its memory, and is written by its encoder."""
    plans = Plans(spec, 4, COUNTS[spec])
    kept = [call for call in plans.calls(2, phase) if not _writes_payload_to_send(call)]
    assert len(kept) < len(plans.calls(2, phase))
    plans.change(2, phase, calls=tuple(kept))
    with pytest.raises(PlanError, match=f"rank 2, phase {phase}: reads .* nobody has written some"):
        plans.verify()


def _writes_payload_to_send(call: Call) -> bool:
    return isinstance(call, Encode) and isinstance(call.target, SparsePayload)


@pytest.mark.parametrize("spec", [GATHERED, SPLIT])
def test_entries_that_are_encoded_before_they_are_selected_are_found(spec: str) -> None:
    plans = Plans(spec, 3, COUNTS[spec])
    keys, select, *encode = plans.calls(0, 0)
    plans.change(0, 0, calls=(keys, *encode, select))
    with pytest.raises(PlanError, match=r"rank 0, phase 0: reads .* nobody has written some"):
        plans.verify()


def test_a_wrong_partner_is_found() -> None:
    """Two payloads go to each other's rank: the owners add up entries of other regions."""
    plans = Plans(SPLIT, 4, 300)
    messages = plans.messages(0, 0)
    sends = [place for place, message in enumerate(messages) if message.is_send]
    first, second = messages[sends[0]], messages[sends[-1]]
    messages[sends[0]], messages[sends[-1]] = first._replace(peer=second.peer), second._replace(peer=first.peer)
    plans.change(0, 0, messages=tuple(messages))
    wanted = expected(plans, SPLIT)
    assert all(held != wanted for held in plans.results())


def test_a_partner_that_does_not_expect_a_message_is_found() -> None:
    plans = Plans(GATHERED, 3, 1000)
    messages = [message._replace(peer=1) if message.is_send else message for message in plans.messages(0, 0)]
    plans.change(0, 0, messages=tuple(messages))
    with pytest.raises(PlanError, match="ranks 2 wait for messages that nobody sends"):
        plans.verify()


def test_a_payload_that_is_overwritten_while_it_is_sent_is_found() -> None:
    plans = Plans(SPLIT, 3, 300)
    encode = plans.calls(0, 0)[-1]
    plans.change(0, 1, calls=tuple(plans.calls(0, 1)), waits_for=None)
    plans.phases[0].insert(1, plans.phases[0][0]._replace(waits_for=None, calls=(encode,), messages=None))
    with pytest.raises(PlanError, match="rank 0, phase 1: writes memory that is being sent"):
        plans.verify()


@pytest.mark.parametrize("spec", [GATHERED, SPLIT])
def test_a_lost_contribution_is_found(spec: str) -> None:
    plans = Plans(spec, 3, COUNTS[spec])
    calls = plans.calls(1, 1)
    adding = calls[1]
    assert isinstance(adding, Decode)
    calls[1] = Decode(adding.source, adding.out, add=False)
    plans.change(1, 1, calls=tuple(calls))
    wanted = expected(plans, spec)
    assert any(held != wanted for held in plans.results())


@pytest.mark.parametrize("spec", [GATHERED, SPLIT])
def test_entries_are_taken_out_of_the_residual(spec: str) -> None:
    plans = Plans(spec, 3, COUNTS[spec], feedback=True)
    residuals = []
    for rank in range(3):
        out = next(call for call in plans.calls(rank, 0) if isinstance(call, Decode))
        assert isinstance(out.out, MovablePart)
        residuals.append(out.out)
    vectors = [np.empty(plans.count, np.float32) for _ in range(3)]
    for part, vector in zip(residuals, vectors, strict=True):
        part.vector.move(vector)
    for phases in plans.phases:
        phases[0] = phases[0]._replace(calls=tuple(call for call in phases[0].calls if not _is_open(call)))
    for rank, contents in enumerate(verify_phases(plans.phases, [{"x": x} for x in plans.x], vectors)):
        (residual,) = (each.held for each in contents)
        assert isinstance(residual, tuple)
        what, function, before, entries = residual
        assert (what, function) == ("decoded", address(sparse_codec.take_out))
        assert entries == ("encoded", address(sparse_codec.largest), before)
        assert before[-2:] == (("kept", rank), ("x", rank))


def _is_open(call: Call) -> bool:
    """Say whether a call opens the error feedback, which moves the residual."""
    return isinstance(call, KernelCall) and not call.arguments and getattr(call.function, "__name__", "") == "_begin"
