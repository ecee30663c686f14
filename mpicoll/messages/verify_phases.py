"""Verifier of plans of messages and calls: it follows what every byte of all ranks' memory holds.

The plans of all ranks are executed on expressions in place of numbers. A message or a call may read only what has been
written, and may not write what a message under way reads or writes. What is found for one interleaving holds for all: a
rank's own order is fixed by its phases, and messages are matched by their senders, receivers and steps. In the end the
result of a rank is an expression, such as the decoded payload of a sum of decoded payloads.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np

from mpicoll.kernels import instructions
from mpicoll.messages.calls import Call, Instruction, KernelCall, MovablePart, present
from mpicoll.messages.lowering import Message, Phase
from mpicoll.messages.prefixed_sends import PrefixedMemory

Expression = Hashable
Range = tuple[int, int]
_Sent = dict[tuple[int, int, int], list[tuple[int, Expression]]]
"""By sender, receiver and step: the bytes of each message, and what they hold."""
_NAMES = {
    instructions.REDUCE_BOUND: "reduced",
    instructions.COPY_BOUND: "copied",
    instructions.ENCODE: "encoded",
    instructions.DECODE: "decoded",
}


class PlanError(Exception):
    """A plan that is wrong; the text names the rank, its phase and the first error."""


class Piece(NamedTuple):
    """Bytes ``start`` to ``stop - 1`` of what an expression stands for."""

    whole: Expression
    start: int
    stop: int


class Content(NamedTuple):
    """An expression that the addresses ``start`` to ``stop - 1`` hold."""

    start: int
    stop: int
    held: Expression

    def part(self, start: int, stop: int) -> Content:
        """Return what a range of addresses inside it holds."""
        if (start, stop) == (self.start, self.stop):
            return self
        held, first = (self.held.whole, self.held.start) if isinstance(self.held, Piece) else (self.held, 0)
        return Content(start, stop, Piece(held, first + start - self.start, first + stop - self.start))


class Memory:
    """Contents of one rank's memory, and the ranges of addresses that messages under way use."""

    def __init__(self) -> None:
        self._contents: list[Content] = []
        self._used: dict[int, list[tuple[Range, str]]] = {}

    def contents(self, array: np.ndarray) -> list[Content]:
        """Return what the parts of an array hold, in their order; all of it must have been written."""
        start, stop = _range(array)
        found = [
            each.part(max(start, each.start), min(stop, each.stop))
            for each in sorted(self._contents)
            if each.start < stop and start < each.stop
        ]
        ends = [start, *(each.stop for each in found)]
        if [each.start for each in found] != ends[:-1] or ends[-1] != stop:
            raise PlanError(f"reads {array.nbytes} bytes, of which nobody has written some")
        return found

    def read(self, array: np.ndarray) -> Expression:
        """Return what an array holds."""
        found = self.contents(array)
        return found[0].held if len(found) == 1 else tuple(each.held for each in found)

    def write(self, array: np.ndarray, held: Expression) -> None:
        """Let an array hold something; no message under way may use it."""
        self.refuse_use(array)
        self.clear(array)
        self._contents.append(Content(*_range(array), held))

    def clear(self, array: np.ndarray) -> None:
        """Forget what an array holds."""
        start, stop = _range(array)
        kept = []
        for each in self._contents:
            cuts = ((each.start, min(each.stop, start)), (max(each.start, stop), each.stop))
            kept += [each.part(first, last) for first, last in cuts if first < last]
        self._contents = kept

    def adopt(self, array: np.ndarray, held: Expression) -> None:
        """Let an array hold something, unless it has been written."""
        start, stop = _range(array)
        if not any(each.start < stop and start < each.stop for each in self._contents):
            self.write(array, held)

    def refuse_use(self, array: np.ndarray) -> None:
        """Raise PlanError if a message under way reads or writes the array."""
        start, stop = _range(array)
        for (first, last), what in chain.from_iterable(self._used.values()):
            if first < stop and start < last:
                raise PlanError(f"writes memory that is being {what}")

    def use(self, step: int, array: np.ndarray, what: str) -> None:
        """Note that a message of a step uses an array: it is ``"sent"``, or ``"received"``."""
        self._used.setdefault(step, []).append((_range(array), what))

    def release(self, step: int) -> None:
        """Note that all messages of a step are complete."""
        self._used.pop(step, None)


def _range(array: np.ndarray) -> Range:
    start = int(array.ctypes.data)
    return start, start + array.nbytes


class _Rank:
    """The execution of one rank's phases; it stops at waits for messages that have not been sent."""

    def __init__(self, rank: int, phases: Sequence[Phase], given: Mapping[str, np.ndarray]) -> None:
        self.rank, self._phases, self.memory = rank, phases, Memory()
        self.at = self._steps = 0
        self._posted: dict[int, tuple[Message, ...]] = {}
        for name, array in given.items():
            self.memory.write(array, (name, rank))

    @property
    def ended(self) -> bool:
        return self.at == len(self._phases)

    def advance(self, sent: _Sent) -> bool:
        """Execute the next phase; return False if it waits for messages that have not been sent."""
        phase = self._phases[self.at]
        try:
            if phase.waits_for is not None and not self._receive(phase.waits_for, sent):
                return False
            for call in phase.calls:
                self._call(call)
            if phase.messages is not None:
                self._post(phase.messages, sent)
        except PlanError as error:
            raise PlanError(f"rank {self.rank}, phase {self.at}: {error}") from None
        self.at += 1
        return True

    def _receive(self, step: int, sent: _Sent) -> bool:
        messages = self._posted[step]
        receives = [message for message in messages if not message.is_send]
        if any(not sent.get((message.peer, self.rank, step)) for message in receives):
            return False
        self.memory.release(step)
        for message in receives:
            nbytes, held = sent[message.peer, self.rank, step].pop(0)
            array = _array(message)
            if nbytes > array.nbytes:
                raise PlanError(f"has room for {array.nbytes} bytes from rank {message.peer}, which sends {nbytes}")
            self.memory.write(array[:nbytes], held)
        return True

    def _post(self, messages: tuple[Message, ...], sent: _Sent) -> None:
        step, self._steps = self._steps, self._steps + 1
        self._posted[step] = messages
        for message in messages:
            array = _array(message)
            if message.is_send:
                held = self.memory.read(array)
                sent.setdefault((self.rank, message.peer, step), []).append((array.nbytes, held))
                self.memory.use(step, array, "sent")
            else:
                self.memory.refuse_use(array)
                self.memory.clear(array)
                self.memory.use(step, array, "received")

    def _call(self, call: Call) -> None:
        found = call.instruction()
        if found is None:
            if isinstance(call, KernelCall) and not call.arguments:
                call()  # what only the interpreter does between operations, such as opening an error feedback
            return
        if found.writes is not None:
            self._execute(found)

    def _execute(self, found: Instruction) -> None:
        assert found.writes is not None
        for each in (found.writes, *found.reads):
            if isinstance(each, MovablePart):
                self.memory.adopt(each.vector.array, ("kept", self.rank))
        name = (_NAMES[found.kind], found.numbers.get("function", 0))
        held = (*name, *found.part, *(self.memory.read(present(each)) for each in found.reads))
        self.memory.write(present(found.writes), held)


def _array(message: Message) -> np.ndarray:
    data = message.data.memory if isinstance(message.data, PrefixedMemory) else message.data
    assert isinstance(data, np.ndarray)
    return data


def verify_phases(
    plans: Sequence[Sequence[Phase]], given: Sequence[Mapping[str, np.ndarray]], results: Sequence[np.ndarray]
) -> list[list[Content]]:
    """Execute the plans of all ranks, and return what they leave in `results`, by rank and in order of addresses.

    Parameters
    ----------
    given
        By rank, memory that holds something before the plan begins, by names for the expressions.
    results
        By rank, memory to be read at the end.

    Raises
    ------
    PlanError
        If a plan reads what is not there, writes what is in use, or waits for ever.
    """
    ranks = [_Rank(rank, phases, there) for rank, (phases, there) in enumerate(zip(plans, given, strict=True))]
    sent: _Sent = {}
    while any(not rank.ended for rank in ranks):
        advanced = [rank.advance(sent) for rank in ranks if not rank.ended]
        if not any(advanced):
            waiting = ", ".join(str(rank.rank) for rank in ranks if not rank.ended)
            raise PlanError(f"ranks {waiting} wait for messages that nobody sends")
    if any(sent.values()):
        raise PlanError("messages are sent that nobody receives")
    return [rank.memory.contents(result) for rank, result in zip(ranks, results, strict=True)]
