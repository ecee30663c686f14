"""Explicit steps of all ranks as arrays, and an order in which to simulate them.

The actions of a rank are posts and completions of steps: it posts a step as soon as the window allows that, else it
completes the oldest one. The *level* of an action is one more than the highest level of the actions that it waits for.
Actions of one level belong to different ranks and can be computed together. Levels do not depend on times.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mpicoll.schedules.all_ranks import Irregular
from mpicoll.schedules.replay import ScheduleError
from mpicoll.schedules.types import Reduce

Array = np.ndarray


class Level(NamedTuple):
    """Steps to post, messages to start, steps to complete.

    `posted`, `received` and `sent` are the messages of those steps, each with the place of its step among them.
    """

    post: Array
    posted: tuple[Array, Array]
    start: Array
    complete: Array
    received: tuple[Array, Array]
    sent: tuple[Array, Array]


class Columns:
    """All messages and steps of an irregular part.

    Messages are in the order in which they are sent: by rank, step, and place in the step.

    Attributes
    ----------
    source, dest, begin, end, reduces
        Per message: ranks, chunks, and whether it is reduced where it arrives.
    send_step, recv_step
        Per message: numbers of its steps; `next_step` is the step in which its rank sends again, or ``steps + rank``.
    number
        Per message: the number of its step within its rank.
    rank_of
        Per step: its rank.
    """

    def __init__(self, part: Irregular) -> None:
        self.size = len(part.steps)
        lengths = [len(steps) for steps in part.steps]
        self.first = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        self.steps = int(self.first[-1])
        self.rank_of = np.repeat(np.arange(self.size), lengths)
        rows = _matched(part, self.first.tolist())
        columns = np.array(rows, np.int64).reshape(-1, 7).T
        self.source, self.dest, self.begin, self.end, self.send_step, self.recv_step, reduces = columns
        self.reduces = reduces != Reduce.COPY
        self.number = self.send_step - self.first[self.source]
        self.next_step = self._next_steps()
        self.first_send = self.steps + np.arange(self.size)
        ranks, at = np.unique(self.source, return_index=True)
        self.first_send[ranks] = self.send_step[at]
        self.levels = self._levels(part.window)

    def _next_steps(self) -> Array:
        """Return for each message the next step in which its rank sends anything."""
        found = self.steps + self.source
        own = np.unique(self.send_step)
        place = np.searchsorted(own, self.send_step) + 1
        later = own[np.minimum(place, len(own) - 1)] if len(own) else own
        same = (place < len(own)) & (self.rank_of[later] == self.source) if len(own) else np.zeros(0, bool)
        return np.where(same, later, found)

    def _levels(self, window: int) -> list[Level]:
        partners: list[list[int]] = [[] for _ in range(self.steps)]
        for send, recv in zip(self.send_step.tolist(), self.recv_step.tolist(), strict=True):
            partners[send].append(recv)
            partners[recv].append(send)
        post, complete = _order(self.first.tolist(), partners, window)
        start = np.maximum(post[self.send_step], post[self.recv_step]) + 1
        count = int(max(complete, default=-1)) + 1
        posts, completes, starts = _grouped(post, count), _grouped(complete, count), _grouped(start, count)
        by_send, by_recv = _Index(self.send_step, self.steps), _Index(self.recv_step, self.steps)
        return [
            Level(posts[i], by_send.of(posts[i]), starts[i], completes[i], by_recv.of(completes[i]),
                  by_send.of(completes[i]))
            for i in range(count)
        ]  # fmt: skip


def _matched(part: Irregular, first: Sequence[int]) -> list[tuple[int, ...]]:
    """Return a row for each message: the k-th send from a to b matches the k-th receive at b from a."""
    waiting: dict[tuple[int, int], deque[tuple[int, Reduce]]] = {}
    for rank, steps in enumerate(part.steps):
        for number, step in enumerate(steps, first[rank]):
            for recv in step.recvs:
                waiting.setdefault((recv.peer, rank), deque()).append((number, recv.reduce))
    rows: list[tuple[int, ...]] = []
    for rank, steps in enumerate(part.steps):
        for number, step in enumerate(steps, first[rank]):
            for send in step.sends:
                queue = waiting.get((rank, send.peer))
                if not queue:
                    raise ScheduleError(f"rank {rank}: rank {send.peer} does not receive its message")
                recv_step, reduce = queue.popleft()
                rows.append((rank, send.peer, send.start, send.stop, number, recv_step, int(reduce)))
    if any(waiting.values()):
        raise ScheduleError("a rank waits for a message that is never sent")
    return rows


def _order(first: Sequence[int], partners: list[list[int]], window: int) -> tuple[Array, Array]:
    """Return the levels at which each step is posted, and completed."""
    size, steps = len(first) - 1, first[-1]
    post, complete = [-1] * steps, [-1] * steps
    rank_of = [rank for rank in range(size) for _ in range(first[rank], first[rank + 1])]
    posted, completed, last = list(first[:-1]), list(first[:-1]), [-1] * size
    ready = deque(range(size))
    while ready:
        rank = ready.popleft()
        end = first[rank + 1]
        while completed[rank] < end:
            step = posted[rank]
            if step < end and step - completed[rank] < window:
                last[rank] = post[step] = last[rank] + 1
                posted[rank] += 1
                ready.extend(rank_of[other] for other in partners[step] if post[other] >= 0)
                continue
            step = completed[rank]
            if any(post[other] < 0 for other in partners[step]):
                break
            # A message starts one level after both of its ends are posted, and is through one level after that.
            begun = max((post[other] for other in partners[step]), default=-1)
            last[rank] = complete[step] = max(last[rank], begun + 1, post[step] + 1) + 1
            completed[rank] += 1
    stuck = [rank for rank in range(size) if completed[rank] < first[rank + 1]]
    if stuck:
        raise ScheduleError(f"deadlock: ranks {stuck} wait")
    return np.array(post, np.int64), np.array(complete, np.int64)


def _grouped(level: Array, count: int) -> list[Array]:
    """Return for each level what has it."""
    order = np.argsort(level, kind="stable")
    bounds = np.searchsorted(level[order], np.arange(count + 1))
    return [order[bounds[i] : bounds[i + 1]] for i in range(count)]


class _Index:
    """Finds the messages of steps."""

    def __init__(self, step_of: Array, steps: int) -> None:
        self.order = np.argsort(step_of, kind="stable")
        self.bounds = np.searchsorted(step_of[self.order], np.arange(steps + 1))

    def of(self, steps: Array) -> tuple[Array, Array]:
        """Return the messages of these steps in order, and for each the place of its step in `steps`."""
        lengths = self.bounds[steps + 1] - self.bounds[steps]
        place = np.repeat(np.arange(len(steps)), lengths)
        begin = np.cumsum(lengths) - lengths
        within = np.arange(int(lengths.sum())) - begin[place]
        return self.order[self.bounds[steps][place] + within], place
