"""Plans that a channel keeps for repeated calls."""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from typing import Any

from mpicoll.shared_memory.fast_dispatch import FastDispatch

MAX_PLANS = 256
"""The largest number of plans kept for repeated calls; each holds its requests."""


class KeptPlans:
    """Plans by their keys; the least recently used ones make room for new ones.

    Attributes
    ----------
    lanes, known
        Cached plans by the keys of calls (:mod:`mpicoll.collectives.plan_cache`), and by their numbers in the dispatch
        table (:mod:`mpicoll.collectives.compiled_calls`).
    """

    def __init__(self, dispatch: FastDispatch) -> None:
        self._dispatch = dispatch
        self._plans: dict[Hashable, Any] = {}
        self.lanes: dict[Hashable, Any] = {}
        self.known: dict[int, Any] = {}

    def find(self, key: Hashable) -> Any:
        """Return the plan kept under `key`; None if there is none."""
        plan = self._plans.get(key)
        if plan is not None:
            plan.used = self._dispatch.number + 1
        return plan

    def keep(self, key: Hashable, plan: Any) -> None:
        """Keep a plan under `key`; if there is no room, the least recently used one is freed, with all its keys.

        Plans are freed whose keys have a weak reference to an object that is gone.
        """
        for stale in [kept for kept in self._plans if _is_stale(kept)]:
            self._drop(stale)
        if len(self._plans) >= MAX_PLANS:
            # Calls note the number of the collective, which costs them less than keeping an order would.
            self._drop(min(self._plans, key=lambda kept: self._plans[kept].last_use))
        plan.used = self._dispatch.number + 1
        self._plans[key] = plan

    def _drop(self, key: Hashable) -> None:
        dropped = self._plans.pop(key)
        for lane in dropped.lanes:
            del self.lanes[lane]
        self._dispatch.forget(dropped.table.address)
        self.known = {number: each for number, each in self.known.items() if each.plan is not dropped}
        dropped.free()

    def release(self, is_broken: bool) -> None:
        """Drop all plans, and free their requests unless the channel is broken; local."""
        for plan in () if is_broken else self._plans.values():
            plan.free()
        for kept in (self._plans, self.lanes, self.known):
            kept.clear()
        self._dispatch.forget_all()


def _is_stale(key: Hashable) -> bool:
    """Return whether a key has a weak reference to an object that is gone."""
    return isinstance(key, tuple) and any(type(part) is weakref.ref and part() is None for part in key)
