"""Polling back-off of waits: poll, then yield the core, then sleep, with a deadline.

The number of polls before a rank yields depends on whether every rank of the node has a core to itself.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from mpicoll.communicator.predefined import WORLD
from mpicoll.environment import core_limit, core_numbers, local_ranks
from mpicoll.progress import driver_thread
from mpicoll.progress.communicator_creation import node_communicator
from mpicoll.progress.running_clock import RunningClock

POLLS_BEFORE_YIELD = 200
"""About the time of a message on one node; with fewer cores than ranks the peer needs the core at once."""
_MAX_CORES = 1024
SECONDS_BEFORE_SLEEP = 0.02
SLEEP_SECONDS = 100e-6
_PROBE_SECONDS = 500e-6
"""Time after which a wait calls the MPI library, and then between two such calls."""
LOOK_AFTER_SECONDS = 0.2
"""Time after which the ranks report to each other what they wait for."""


class _OfThread(threading.local):
    """Settings of a thread's waits: `is_patient` says when they sleep at once, None for never."""

    is_patient: Callable[[], bool] | None = None


_of_thread = _OfThread()


def be_patient_while(is_patient: Callable[[], bool]) -> None:
    """Make waits of this thread sleep at once where `is_patient` returns True, and not only after 20 ms.

    For a thread that shares a core with one that computes: yielding it takes half of it.
    """
    _of_thread.is_patient = is_patient


class NodeCores(NamedTuple):
    """Number of a communicator's ranks on this node, of cores that this rank may use, and of cores of all of them."""

    ranks: int
    own: int
    together: int


def cores_on_node(comm: MPI.Intracomm) -> NodeCores:
    """Return the numbers of ranks and cores on this node; collective."""
    node = node_communicator(comm)
    found = _count_cores(node)
    node.Free()
    return found


def _count_cores(node: MPI.Comm) -> NodeCores:
    mask = np.zeros(_MAX_CORES, np.uint8)
    mask[[core % _MAX_CORES for core in core_numbers()]] = 1
    own = int(mask.sum())
    node.Allreduce(MPI.IN_PLACE, mask, MPI.MAX)
    limit = core_limit() or _MAX_CORES
    return NodeCores(node.size, min(own, limit), min(int(mask.sum()), limit))


def polls_before_yield(node: MPI.Comm) -> int:
    """Return the number of polls before the core is yielded: 1 if the node is oversubscribed; collective.

    Ranks may see different limits; a node is oversubscribed if one of its ranks finds it to be.

    Parameters
    ----------
    node
        Communicator of the ranks on this node.
    """
    here, own, together = _count_cores(node)
    # Where nobody is pinned other communicators' ranks want these cores too.
    ranks = max(here, local_ranks() or 1) if together == own else here
    driver_thread.consider(here, own, together, ranks)
    oversubscribed = np.array([ranks > together], np.int64)
    node.Allreduce(MPI.IN_PLACE, oversubscribed, MPI.MAX)
    return 1 if oversubscribed[0] else POLLS_BEFORE_YIELD


def let_library_progress() -> None:
    """Call the MPI library: other ranks may need this one for one-sided operations, and for long messages of theirs.

    A probe on COMM_SELF makes no progress under MPICH.
    """
    with contextlib.suppress(MPI.Exception):  # of a rank that has died, which the watchdog reports
        WORLD.Iprobe()


def wait_until(done: Callable[[], bool], polls: int, look: Callable[[float], float]) -> None:
    """Call `done` until it returns True.

    Parameters
    ----------
    polls
        Number of polls before the core is yielded.
    look
        The watchdog: ``look(waited) -> seconds`` is called after 0.2 s. It raises to end the wait, or returns the
        number of seconds, from the start of the wait, at which to call it again. Seconds are those of a
        `RunningClock`.
    """
    for _ in range(polls):
        if done():
            return
    clock, look_at, probe_at = RunningClock(), LOOK_AFTER_SECONDS, _PROBE_SECONDS
    is_patient, waited = _of_thread.is_patient, 0.0
    while not done():
        before, waited = waited, clock.read()
        if waited >= probe_at:
            let_library_progress()
            probe_at = waited + _PROBE_SECONDS
        if waited < SECONDS_BEFORE_SLEEP and not (is_patient and is_patient()):
            os.sched_yield()
            continue
        if waited - before < SLEEP_SECONDS:  # otherwise `done` has slept, or been at work
            time.sleep(SLEEP_SECONDS)
            waited = clock.read()
        if waited >= look_at:
            look_at = look(waited)
