"""Comparison of the ranks' calls before any data moves.

One allreduce of (code, -code) with MIN, of 32 bytes, tells every rank whether all codes are equal. So either all ranks
raise or none does, and the communicator stays usable. There are two codes: one of the part of the call that all ranks
know, and one of the whole call, from which ranks that do not know it abstain. Lengths that only the two ranks of a pair
know are compared in a second allreduce, of one sum. ``MPICOLL_CHECK`` decides when calls are compared: in mode ``full``
before every call; by default only if a rank could complete the call before the others have entered it (collectives with
a root, scan and exscan), and only for the first call with a signature.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, NoReturn

import numpy as np
from mpi4py import MPI

from mpicoll.buffers.reduction_ops import reducer_for
from mpicoll.communicator.channel import Channel
from mpicoll.communicator.tags import Tags
from mpicoll.errors import MismatchError, RemoteError, described, named_ranks
from mpicoll.messages.lowering import Vector, lower
from mpicoll.messages.p2p import MessagePlan, Plan, PlanRun
from mpicoll.progress.call_signature import Signature, Waiting
from mpicoll.progress.in_flight import InFlight
from mpicoll.schedules import find

_RECORD_NBYTES = 2048
_INT64 = np.dtype(np.int64)
_UNKNOWN = np.iinfo(_INT64).max
_UINT8 = np.dtype(np.uint8)


class PairLengths(NamedTuple):
    """Lengths of the blocks that a rank sends to each rank and expects from each, in bytes."""

    sent: Sequence[int]
    expected: Sequence[int]


def _private_plan(channel: Channel, tag: int, count: int, op: MPI.Op | None) -> Plan:
    """Return the plan of an allreduce of `count` int64, or without `op` of an allgather of `count` bytes a rank."""
    plan: Plan | None = channel.plans.find(tag)
    if plan is None:
        name = ("allgather", "bruck") if op is None else ("allreduce", "recursive_doubling")
        dtype: np.dtype[Any] = _UINT8 if op is None else _INT64
        schedule = find(*name).schedule(channel.size, channel.rank)
        memory = np.empty(schedule.chunks * count, dtype)
        vector = Vector(None, memory, [chunk * count for chunk in range(schedule.chunks + 1)])
        reducer = None if op is None else reducer_for(op, dtype)
        stages = lower(schedule, vector, reducer, lambda count: np.empty(count, dtype))
        plan = MessagePlan(channel, stages, Signature.of("agreement"), tag, inbox=memory)
        channel.plans.keep(tag, plan)
    return plan


class _Agreement(PlanRun):
    """A run of a private plan; a rank that waits in it waits for the user's call."""

    __slots__ = ()

    def waiting(self) -> Waiting:
        """Return the state of the wait."""
        return super().waiting()._replace(is_agreement=True)


def _run(
    channel: Channel, plan: Plan, signature: Signature, number: int, timeout: float, *, nonblocking: bool = False
) -> np.ndarray:
    plan.signature = signature
    run = _Agreement(channel, plan, number)
    run.is_nonblocking = nonblocking
    run.finish(timeout)
    assert plan.inbox is not None
    return plan.inbox


def agree(
    channel: Channel,
    signature: Signature,
    number: int,
    timeout: float,
    error: Exception | None = None,
    *,
    nonblocking: bool = False,
) -> None:
    """Compare `signature` with those of the other ranks; the communicator stays usable. Collective.

    Parameters
    ----------
    error
        The exception of this rank, if its arguments are wrong; it is raised after the comparison.
    nonblocking
        True for a nonblocking call, which does not match a blocking one.

    Raises
    ------
    MismatchError
        On every rank, if the signatures differ.
    RemoteError
        If another rank's arguments are wrong and this one's are not.
    CollectiveTimeout
        If a rank did not enter the call in time.
    """
    channel.watchdog.compared.append(number)
    full = signature.as_nonblocking() if nonblocking else signature
    text = full.text if error is None else f"!{described(error)}"
    code = Signature.of(text).code
    common = full.base if error is None and full.base else code
    plan, run = _private_plan(channel, Tags.AGREEMENT, 4, MPI.MIN), partial(_run, nonblocking=nonblocking)
    assert plan.inbox is not None
    plan.inbox[:] = common, -common, code, -code
    if error is None and not full.is_complete:
        plan.inbox[2:] = _UNKNOWN
    lowest, highest, *codes = run(channel, plan, signature, number, timeout).tolist()
    differs = lowest != -highest or (codes[0] != -codes[1] and codes != [_UNKNOWN] * 2)
    if error is None and not differs:
        return
    texts = _exchange(channel, text, signature, number, timeout, run) if differs else []
    if error is not None:
        raise error
    _raise_difference(number, texts)


def agree_on_lengths(
    channel: Channel, lengths: PairLengths, signature: Signature, number: int, timeout: float, *, nonblocking: bool
) -> None:
    """Compare what each rank sends to each with what that rank expects; the communicator stays usable. Collective.

    Every rank adds hashes of what it sends and subtracts those of what it expects. If all pairs agree, the sum over all
    ranks is 0; if not, all ranks exchange their lengths, in order to name a pair.

    Raises
    ------
    MismatchError
        On every rank, if the lengths differ in a pair of ranks.
    CollectiveTimeout
        If a rank did not enter the call in time.
    """
    plan, run = _private_plan(channel, Tags.LENGTHS, 1, MPI.SUM), partial(_run, nonblocking=nonblocking)
    assert plan.inbox is not None
    plan.inbox[:] = _balance(channel.rank, lengths)
    if int(run(channel, plan, signature, number, timeout)[0]) == 0:
        return
    plan = _private_plan(channel, Tags.ALL_LENGTHS, 2 * channel.size * _INT64.itemsize, None)
    assert plan.inbox is not None
    everything = plan.inbox.view(_INT64).reshape(channel.size, 2, channel.size)
    everything[channel.rank] = lengths
    run(channel, plan, signature, number, timeout)
    sent, expected = everything[:, 0], everything[:, 1].T
    source, target = map(int, np.argwhere(sent != expected)[0])
    text = (signature.as_nonblocking() if nonblocking else signature).text
    raise MismatchError(
        f"collective {number} of this communicator, {text}, differs between ranks: rank {source} sends "
        f"{sent[source, target]} bytes to rank {target}, which expects {expected[source, target]}"
    )


def compare(
    channel: Channel,
    signature: Signature,
    lengths: PairLengths | None,
    number: int,
    timeout: float,
    *,
    nonblocking: bool = False,
) -> None:
    """Compare a call and, if they are not part of its signature, the lengths of its blocks; collective."""
    agree(channel, signature, number, timeout, nonblocking=nonblocking)
    if lengths is not None:
        agree_on_lengths(channel, lengths, signature, number, timeout, nonblocking=nonblocking)


def _balance(rank: int, lengths: PairLengths) -> int:
    """Return the sum of hashes of what a rank sends, minus that of what it expects, as an int64 that wraps around."""
    total = sum(_hash(rank, peer, nbytes) for peer, nbytes in enumerate(lengths.sent))
    total -= sum(_hash(peer, rank, nbytes) for peer, nbytes in enumerate(lengths.expected))
    return (total + (1 << 63)) % (1 << 64) - (1 << 63)


def _hash(source: int, target: int, nbytes: int) -> int:
    return int.from_bytes(
        hashlib.blake2b(np.array([source, target, nbytes]).tobytes(), digest_size=8).digest(), "little"
    )


def refuse(channel: Channel, collective: str, error: Exception, timeout: float) -> NoReturn:
    """Tell the other ranks that this one refuses a call, in which mode ``full`` compares calls, and raise `error`.

    Raises
    ------
    Exception
        `error`; in mode ``full`` the other ranks have raised RemoteError, and the communicator stays usable.
    """
    if channel.check == "full" and channel.broken is None:
        signature = Signature.refusing(collective)
        agree(channel, signature, channel.enter(signature), timeout, error)
    channel.refuse(error)
    raise error


@contextmanager
def announced(channel: Channel) -> Iterator[None]:
    """Context that tells the other ranks if an exception keeps this one from a call that they make now.

    That may be a KeyboardInterrupt, too.
    """
    try:
        yield
    except BaseException as error:
        channel.refuse(error)
        raise


class NoSlotFree(RuntimeError):
    """No tag slot of a communicator is free on all ranks."""


def take_slot(channel: Channel, signature: Signature, number: int, timeout: float) -> int:
    """Return a tag slot that is free on all ranks, the same on all, for a persistent operation; collective.

    Operations are set up in the same order on all ranks, but freed at any time. The ranks therefore agree on the list
    of all slots that are free on every rank, and take slots from it without communication until it is empty.

    Raises
    ------
    NoSlotFree
        On every rank.
    MismatchError, RemoteError, CollectiveTimeout
        As for :func:`agree`.
    """
    if not channel.slots:
        slots = channel.tags.persistent_slots
        plan = _private_plan(channel, Tags.SLOTS, len(slots), MPI.MIN)
        assert plan.inbox is not None
        plan.inbox[:] = [slot not in channel.occupants for slot in slots]
        free = _run(channel, plan, signature, number, timeout)
        channel.slots.extend(slots[place] for place in np.flatnonzero(free).tolist())
    if not channel.slots:
        alive = len(channel.tags.persistent_slots)
        raise NoSlotFree(f"persistent request: all {alive} tag slots of the communicator are in use; free requests")
    return channel.slots.popleft()


def free_lane(channel: Channel, busy: int, count: int, signature: Signature, number: int, timeout: float) -> int | None:
    """Return the number of an operation lane that is free on all ranks, None if there is none; collective.

    Parameters
    ----------
    busy
        The lanes in use on this rank, as bits.
    count
        The number of lanes.
    """
    plan = _private_plan(channel, Tags.LANES, 1, MPI.BOR)
    assert plan.inbox is not None
    plan.inbox[0] = busy
    used = int(_run(channel, plan, signature, number, timeout)[0])
    return next((lane for lane in range(count) if not used >> lane & 1), None)


class _Settling(InFlight):
    """The wait of a rank that has refused a call for the other ranks' refusals."""

    __slots__ = ()

    def advance(self) -> bool:
        """Read control messages; return whether all other ranks have refused the call."""
        return self.channel.watchdog.all_refused(self.number)

    def waiting(self) -> Waiting:
        """Describe what is waited for."""
        missing = self.channel.watchdog.not_refused(self.number)
        return Waiting(self.number, Signature.refusing("a call"), "until all ranks refuse it", missing)

    def abandon(self, error: BaseException) -> None:
        """Mark the channel as broken: other ranks are in a call that this rank does not make."""
        self.channel.break_off(error)


def settle(channel: Channel, timeout: float) -> None:
    """Return once every rank has refused the call that this rank refused last; the communicator is then usable.

    Raises
    ------
    RemoteError, CollectiveTimeout
        If another rank made the call, or did not enter it in time; the communicator is broken then.
    """
    number, channel.refusal = channel.refusal, None
    if number is not None and channel.broken is None:
        _Settling(channel, number).finish(timeout)


def _exchange(
    channel: Channel, text: str, signature: Signature, number: int, timeout: float, run: Callable[..., np.ndarray]
) -> list[str]:
    """Return every rank's text."""
    plan = _private_plan(channel, Tags.EXCHANGE, _RECORD_NBYTES, None)
    assert plan.inbox is not None
    records = plan.inbox.reshape(channel.size, _RECORD_NBYTES)
    own = text.encode()[:_RECORD_NBYTES]
    records[channel.rank] = 0
    records[channel.rank, : len(own)] = np.frombuffer(own, _UINT8)
    run(channel, plan, signature, number, timeout)
    return [bytes(record).rstrip(b"\0").decode(errors="replace") for record in records]


def _raise_difference(number: int, texts: list[str]) -> None:
    for rank, text in enumerate(texts):
        if text.startswith("!"):
            raise RemoteError(f"collective {number}: rank {rank} refused its arguments: {text[1:]}")
    calls: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        calls.setdefault(text, []).append(rank)
    parts = [f"{named_ranks(ranks)} called {text}" for text, ranks in calls.items()]
    raise MismatchError(f"collective {number} of this communicator differs between ranks: {'; '.join(parts)}")
