"""Plans that are kept for nonblocking calls: which place a call takes, and when plans are freed."""

from __future__ import annotations

import random
from typing import Any

from mpicoll.collectives import nonblocking_messages
from mpicoll.collectives.nonblocking_messages import NonblockingPlans
from mpicoll.progress.call_signature import Signature


class Plan:
    """A plan that notes when it is freed."""

    freed = 0

    def free(self) -> None:
        self.freed += 1


def made(plans: NonblockingPlans, place: Any, key: object) -> Any:
    kept = plans.plan(place, key, 1000, Plan)  # type: ignore[arg-type]
    kept.take()
    return kept


def test_calls_of_a_signature_take_its_places_in_turn() -> None:
    plans, signature = NonblockingPlans(range(1, 17)), Signature.of("a")
    slots = [plans.place(signature).slot for _ in range(20)]
    assert slots[:8] == slots[8:16]
    assert len(set(slots[:8])) == 8
    others = {plans.place(Signature.of("b")).slot for _ in range(8)}
    assert others.isdisjoint(slots)


def test_ranks_with_different_buffers_use_the_same_slots() -> None:
    """Also when signatures give their slots to others, and when plans are freed."""
    calls = [Signature.of(str(number)) for number in random.Random(3).choices(range(6), k=400)]
    slots = []
    for rank in range(3):
        plans, numbers, taken = NonblockingPlans(range(1, 33)), random.Random(rank), []
        for call in calls:
            place = plans.place(call)
            taken.append(place.slot)
            made(plans, place, numbers.randrange(1 + 30 * rank)).give_back()
        slots.append(taken)
    assert slots[0] == slots[1] == slots[2]


def test_a_plan_is_kept_for_its_key() -> None:
    plans = NonblockingPlans(range(1, 9))
    place = plans.place(Signature.of("a"))
    first, again, other = (made(plans, place, key) for key in ("x", "x", "y"))
    assert first is again
    assert first is not other


def test_plans_in_use_are_freed_later() -> None:
    plans = NonblockingPlans(range(1, 9))
    kept = made(plans, plans.place(Signature.of("a")), "x")
    made(plans, plans.place(Signature.of("a")), "y").give_back()
    plans.place(Signature.of("b"))  # takes the slots
    assert kept.plan.freed == 0
    kept.give_back()
    assert kept.plan.freed == 1


def test_the_number_of_plans_is_limited() -> None:
    plans = NonblockingPlans(range(1, 9))
    place = plans.place(Signature.of("a"))
    kept = [made(plans, place, key) for key in range(3 * nonblocking_messages._MOST_PLANS)]
    for each in kept:
        each.give_back()
    assert sum(each.plan.freed for each in kept) == 2 * nonblocking_messages._MOST_PLANS
    plans.release()
    assert all(each.plan.freed == 1 for each in kept)


def test_the_bytes_of_their_vectors_are_limited() -> None:
    plans = NonblockingPlans(range(1, 9))
    place = plans.place(Signature.of("a"))
    kept = [plans.plan(place, key, 1 << 20, Plan) for key in range(100)]  # type: ignore[arg-type, return-value]
    assert sum(each.plan.freed for each in kept) == 100 - (nonblocking_messages._MOST_KEPT_NBYTES >> 20)


def test_signatures_in_turn_find_their_plans_again() -> None:
    plans, made_now = NonblockingPlans(range(1, 513)), []
    for turn in range(8 * 3):
        for call in range(20):  # such as the buckets of a model's gradients
            place = plans.place(Signature.of(str(call)))
            kept = plans.plan(place, "x", 1000, lambda: made_now.append(1) or Plan())  # type: ignore[func-returns-value, arg-type, return-value]
            kept.take()
            kept.give_back()
        assert len(made_now) == 20 * min(turn + 1, 8)
