"""Nonblocking calls by messages, over one node or several, with plans that are kept for calls of the same signature.

A plan is made in several hundred microseconds, longer than a short collective takes. The calls of one signature
therefore take *places* in turn, each with a tag slot and the plans that were made there. Which place a call takes
follows from the calls before it, which are the same on all ranks; whether a place has a plan for the buffers at hand is
each rank's own matter. A call starts when the call before it has ended in its place on this rank::

    Iallreduce(x)   place 0        Iallreduce(z)  place 2
    Iallreduce(y)   place 1        ...            place 0 again, after the first has ended
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Sequence

from mpicoll.collectives.aggregated_rounds import operation_keys
from mpicoll.collectives.operation import CheckedOperation, fresh_memory
from mpicoll.collectives.requests import Request
from mpicoll.communicator.channel import Channel
from mpicoll.communicator.random_choices import own_counter
from mpicoll.messages.call_agreement import compare
from mpicoll.messages.p2p import Plan, PlanRun
from mpicoll.progress.call_signature import Signature, Waiting
from mpicoll.progress.in_flight import InFlight

_PLACES = 8
"""Calls of one signature that can be under way at the same time; further ones wait for their turn."""
_MOST_NBYTES = 1 << 20
"""Longer vectors take so long that a plan's time does not matter, and their plans hold much memory."""
_MOST_PLANS, _MOST_KEPT_NBYTES = 256, 64 << 20
"""Plans that a communicator keeps for nonblocking calls, and the bytes of their vectors together."""


class KeptPlan:
    """A plan with the number of requests that use it; it is freed after the last of them, once it has been dropped."""

    def __init__(self, plan: Plan, nbytes: int, *, dropped: bool = False) -> None:
        self.plan, self.nbytes, self._dropped = plan, nbytes, dropped
        self._uses = 0

    def take(self) -> None:
        """Note one more use."""
        self._uses += 1

    def give_back(self) -> None:
        """Note the end of a use."""
        self._uses -= 1
        self._free_if_unused()

    def drop(self) -> None:
        """Free the plan, as soon as nobody uses it."""
        self._dropped = True
        self._free_if_unused()

    def _free_if_unused(self) -> None:
        if self._dropped and self._uses == 0:
            self.plan.free()


class Place:
    """A tag slot, and the plans that were made with it, by the operation and its buffers."""

    def __init__(self, slot: int) -> None:
        self.slot = slot
        self.plans: dict[Hashable, KeptPlan] = {}


class NonblockingPlans:
    """Places of nonblocking calls by signature, and their plans.

    Signatures that have not been called for the longest time give their tag slots to new ones, alike on all ranks.
    """

    def __init__(self, slots: range) -> None:
        self._free = [slots[first : first + _PLACES] for first in range(0, len(slots) - _PLACES + 1, _PLACES)]
        self._places: OrderedDict[str, deque[Place]] = OrderedDict()
        """By signature, the places of its calls, that of the next one first."""
        self._plans: OrderedDict[tuple[Place, Hashable], KeptPlan] = OrderedDict()
        """All plans, the least recently used one first."""
        self._nbytes = 0

    def place(self, signature: Signature) -> Place:
        """Return the place of the next call with a signature; all ranks call this once for each call."""
        places = self._places.get(signature.text)
        if places is None:
            slots = self._free.pop() if self._free else self._drop_oldest()
            places = self._places[signature.text] = deque(map(Place, slots))
        self._places.move_to_end(signature.text)
        places.rotate(-1)
        return places[-1]

    def plan(self, place: Place, key: Hashable, nbytes: int, make: Callable[[], Plan]) -> KeptPlan:
        """Return the plan of a place for a key, made if there is none, for vectors of `nbytes` bytes."""
        kept = place.plans.get(key)
        if kept is None:
            kept = place.plans[key] = self._plans[place, key] = KeptPlan(make(), nbytes)
            self._nbytes += nbytes
            while len(self._plans) > 1 and (len(self._plans) > _MOST_PLANS or self._nbytes > _MOST_KEPT_NBYTES):
                self._drop(*next(iter(self._plans)))
        self._plans.move_to_end((place, key))
        return kept

    def _drop_oldest(self) -> Sequence[int]:
        _, places = self._places.popitem(last=False)
        for place in places:
            for key in list(place.plans):
                self._drop(place, key)
        return sorted(place.slot for place in places)

    def _drop(self, place: Place, key: Hashable) -> None:
        self._nbytes -= self._plans.pop((place, key)).nbytes
        place.plans.pop(key).drop()

    def release(self) -> None:
        """Drop all plans."""
        for place, key in list(self._plans):
            self._drop(place, key)


class _QueuedRun(PlanRun):
    """A run that starts when the operations before it, which use the same memory, have ended on this rank."""

    __slots__ = ("_before", "_load")

    def __init__(
        self, channel: Channel, plan: Plan, number: int, before: Sequence[Request], load: Callable[[], None]
    ) -> None:
        InFlight.__init__(self, channel, number)
        self.plan, self._load = plan, load
        self._before: Sequence[Request] | None = before

    def advance(self) -> bool:
        """Start if that is possible, then advance; return whether the run is complete."""
        if self._before is not None:
            if not all(request.has_ended for request in self._before):
                return False
            self.channel.ensure_usable()
            self._before = None
            self._load()
            self._start(None)
        return super().advance()

    def be_patient(self) -> None:
        """Let compiled code poll more often, if the run has started."""
        if self._before is None:
            super().be_patient()

    @property
    def is_queued(self) -> bool:
        """True while an operation before it has to end first."""
        return self._before is not None

    def waiting(self) -> Waiting:
        """Return the state of the wait."""
        if not self.is_queued:
            return super().waiting()
        return Waiting(self.number, self.plan.signature, "step 0: an operation before it in its place", ())

    def abandon(self, error: BaseException) -> None:
        """Abandon the run; if it has not started, no message of it is under way."""
        if self._before is None:
            super().abandon(error)
        else:
            self.break_off(error)


class NonblockingMessageRequest(Request):
    """The request of a nonblocking call by messages, or over several nodes."""

    def __init__(self, task: CheckedOperation, timeout: float) -> None:
        super().__init__(timeout)
        channel, signature = task.channel, task.signature()
        number = channel.enter(signature)
        if channel.check == "full":
            compare(channel, signature, task.pair_lengths(), number, timeout, nonblocking=True)
        self._task: CheckedOperation | None = task
        try:
            kept, slot = _plan_for(task, signature)
        except Exception as error:  # there is no memory for it
            channel.refuse_entered(number, error)
            raise
        self._kept: KeptPlan | None = kept
        kept.take()
        self._resources = task.resources(slot)
        before = [other for occupants, key in self._resources if (other := occupants.get(key)) is not None]
        for occupants, key in self._resources:
            occupants[key] = self
        plan = kept.plan
        self._begin(_QueuedRun(channel, plan, number, before, lambda: task.load(plan)))

    def _complete(self) -> None:
        task, self._task = self._task, None
        if task is not None and self._kept is not None:
            task.unload(self._kept.plan)
            self._leave()
        super()._complete()

    def _leave(self) -> None:
        for occupants, key in self._resources:
            if occupants.get(key) is self:
                del occupants[key]
        kept, self._kept = self._kept, None
        if kept is not None:
            kept.give_back()


def _plan_for(task: CheckedOperation, signature: Signature) -> tuple[KeptPlan, int]:
    """Return the plan of a call and its tag slot."""
    channel = task.channel
    kept = channel.nonblocking_plans
    if task.compression is not None or task.uneven or task.nbytes > _MOST_NBYTES or not signature.is_complete:
        slot = channel.tags.next_slot()
        if task.compression is not None:  # it may start later than other calls, in another order on other ranks
            task.keys, task.counter = operation_keys(channel, apart=True), own_counter(channel)
        return KeptPlan(task.plan(slot, fresh_memory), task.nbytes, dropped=True), slot
    if kept is None:
        kept = channel.nonblocking_plans = NonblockingPlans(channel.tags.kept_slots)
    place = kept.place(signature)
    return kept.plan(place, task.plan_key(), task.nbytes, lambda: task.plan(place.slot, fresh_memory)), place.slot
