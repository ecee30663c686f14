"""Bandwidth and latency of a link between two hosts: ``python -m bench.cluster --check``.

Short messages with answers between a rank of the first host and a rank of the last; half of a round trip is compared
with the delay that was set. One long message, and one each way at the same time. What TCP and
Ethernet add to every packet of 1500 bytes leaves 95 % of the rate for data.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from bench.cluster import VARIABLE
from mpicoll.quantities import format_seconds

NBYTES = 16 << 20
ROUNDS = 5
ROUND_TRIPS = 200


def one_way_seconds(comm: MPI.Intracomm) -> list[float]:
    """Return half the seconds of each of many round trips of 8 bytes, on rank 0; shortest first."""
    last, message, seconds = comm.size - 1, np.zeros(1), []
    for _ in range(ROUND_TRIPS):
        begin = time.perf_counter()
        if comm.rank == 0:
            comm.Send(message, last)
            comm.Recv(message, last)
        elif comm.rank == last:
            comm.Recv(message, 0)
            comm.Send(message, 0)
        seconds.append((time.perf_counter() - begin) / 2)
    return sorted(seconds)


def describe_latency(seconds: Sequence[float], facts: Mapping[str, Any]) -> str:
    """Return a line with the measured latency, shortest first, beside the wanted."""
    low, middle, high = (format_seconds(seconds[int(share * (len(seconds) - 1))]) for share in (0.05, 0.5, 0.95))
    wanted = "no delay set"
    if facts["delay"]:
        jitter = f" ± {format_seconds(facts['jitter'])}" if facts["jitter"] else ""
        wanted = f"set {format_seconds(facts['delay'])}{jitter} by {facts['delayed_by']}"
    return f"one way, half of a round trip: {wanted}; median {middle}, 5 % below {low}, 5 % above {high}"


def best(comm: MPI.Intracomm, call: Callable[[], object]) -> float:
    """Return the least seconds of a few calls."""
    seconds = []
    for _ in range(ROUNDS):
        comm.Barrier()
        begin = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


def measure(comm: MPI.Intracomm, nbytes: int) -> tuple[float, float]:
    """Return seconds of a message to the last rank with a short answer, and of messages both ways."""
    peer = {0: comm.size - 1, comm.size - 1: 0}.get(comm.rank)
    out, back = np.ones(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
    if peer is None:
        return best(comm, lambda: None), best(comm, lambda: None)

    def one_way() -> None:
        if comm.rank == 0:
            comm.Send(out, peer)
            comm.Recv(back[:1], peer)
        else:
            comm.Recv(back, peer)
            comm.Send(out[:1], peer)

    return best(comm, one_way), best(comm, lambda: comm.Sendrecv(out, peer, recvbuf=back, source=peer))


def main() -> int:
    """Measure and print."""
    comm = MPI.COMM_WORLD
    if comm.size < 2 or VARIABLE not in os.environ:
        sys.exit("bench.link_check: needs several hosts: python -m bench.cluster --check")
    facts = json.loads(os.environ[VARIABLE])
    gbit, seconds = facts["gbit"], one_way_seconds(comm)
    times = measure(comm, NBYTES)
    if comm.rank == 0:
        print(f"set {gbit:g} Gbit/s each way")
        print(describe_latency(seconds, facts))
        for name, taken in zip(("one way", "both ways"), times, strict=True):
            rate = NBYTES * 8 / taken / 1e9
            print(f"{name}: {NBYTES >> 20} MB in {taken * 1e3:.1f} ms, {rate:.3f} Gbit/s, {rate / gbit:.1%} of it")
    return 0


if __name__ == "__main__":
    sys.exit(main())
