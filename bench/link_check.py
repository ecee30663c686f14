"""Bandwidth and latency of a link between two hosts: ``python -m bench.cluster --check``.

One long message from a rank of the first host to a rank of the last, and one each way at the same time. What TCP and
Ethernet add to every packet of 1500 bytes leaves 95 % of the rate for data.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable

import numpy as np
from mpi4py import MPI

from bench.cluster import VARIABLE

NBYTES = 16 << 20
SHORT = 8
ROUNDS = 5


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
    gbit = json.loads(os.environ[VARIABLE])["gbit"]
    latency, _ = measure(comm, SHORT)
    times = measure(comm, NBYTES)
    if comm.rank == 0:
        print(f"set {gbit:g} Gbit/s each way; a short message and its answer take {latency * 1e6:.0f} us")
        for name, seconds in zip(("one way", "both ways"), times, strict=True):
            rate = NBYTES * 8 / seconds / 1e9
            print(f"{name}: {NBYTES >> 20} MB in {seconds * 1e3:.1f} ms, {rate:.3f} Gbit/s, {rate / gbit:.1%} of it")
    return 0


if __name__ == "__main__":
    sys.exit(main())
