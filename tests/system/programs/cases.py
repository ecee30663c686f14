"""Cases that programs of ranks that disagree share, and the outcome of a case on this rank as a line of JSON."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from mpi4py import MPI

import mpicoll
from tests.system.outcomes import MISSING_TIMEOUT

TIMEOUT = 4.0
"""Deadline in seconds of cases in which an error comes before it."""
MISSING = {"never_came", "never_came_long", "never_started", "left_early"}
"""Cases in which nothing but the deadline ends the wait."""
RANK = MPI.COMM_WORLD.rank
ODD = RANK == 1
CANARY = 7.0
Comm = mpicoll.Intracomm
Case = Callable[[Comm], None]


def vector(count: int = 10, dtype: str = "f8") -> np.ndarray:
    return np.full(count, CANARY, dtype)


def read_only_on_one(count: int = 10) -> np.ndarray:
    data = vector(count)
    data.flags.writeable = not ODD
    return data


def case_refused(comm: Comm) -> None:
    """Only one rank's arguments are wrong."""
    comm.Allreduce(MPI.IN_PLACE, read_only_on_one())


def case_refused_nonblocking(comm: Comm) -> None:
    comm.Iallreduce(MPI.IN_PLACE, read_only_on_one()).Wait()


def case_refused_bcast(comm: Comm) -> None:
    """The root has sent before it knows; its data must not be taken for those of the next call.

    Where every call is compared, the root has not sent, and the others wait for it until the deadline: left out.
    """
    if os.environ.get("MPICOLL_CHECK") == "full":
        return
    comm.Bcast(vector())
    comm.Barrier()
    try:
        comm.Bcast(read_only_on_one())
    except ValueError:
        data = np.zeros(10)
        comm.Bcast(data)
        raise AssertionError(f"went on with {data}") from None
    comm.Bcast(2 * vector())
    comm.Barrier()


def case_blocking_and_nonblocking(comm: Comm) -> None:
    """The same call, which MPI does not let match its nonblocking form."""
    if ODD:
        comm.Iallreduce(MPI.IN_PLACE, vector()).Wait()
    else:
        comm.Allreduce(MPI.IN_PLACE, vector())


def case_blocking_and_nonblocking_vector(comm: Comm) -> None:
    if ODD:
        comm.Iallgatherv(vector(1), [vector(comm.size), [1] * comm.size]).Wait()
    else:
        comm.Allgatherv(vector(1), [vector(comm.size), [1] * comm.size])


def case_never_came(comm: Comm) -> None:
    if not ODD:
        comm.Allreduce(MPI.IN_PLACE, vector())


def communicator(case: Case) -> Comm:
    """A communicator of the case's own, with its deadline."""
    timeout = MISSING_TIMEOUT if name_of(case) in MISSING else TIMEOUT
    return Comm(MPI.COMM_WORLD.Dup(), timeout=timeout)


def name_of(case: Case) -> str:
    return case.__name__.removeprefix("case_")


def outcome(case: Case, comm: Comm, usable: Callable[[Comm], bool]) -> dict[str, object]:
    """Run a case and try the communicator afterwards."""
    begin = time.monotonic()
    error = None
    try:
        case(comm)
    except Exception as caught:
        error = caught
    seconds = time.monotonic() - begin
    MPI.COMM_WORLD.Barrier()
    begin, works = time.monotonic(), usable(comm)
    return {
        "rank": RANK,
        "case": name_of(case),
        "error": type(error).__name__,
        "text": str(error),
        "seconds": seconds,
        "usable": works,
        "seconds_to_find_out": time.monotonic() - begin,
        "missing": list(getattr(error, "missing_ranks", ())),
    }


def run_cases(names: Mapping[str, Any], attempt: Callable[[Case], dict[str, object]]) -> None:
    """Run the cases of a program and those here that the command line names, by default all (``case_...``)."""
    wanted = sys.argv[1:]
    for case in [value for name, value in {**globals(), **names}.items() if name.startswith("case_")]:
        if not wanted or name_of(case) in wanted:
            sys.stdout.write(json.dumps(attempt(case)) + "\n")
            sys.stdout.flush()
            MPI.COMM_WORLD.Barrier()
