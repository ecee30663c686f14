"""Delays and rates of emulated links: when a frame that came from one port leaves at another.

A frame is due after the delay and a jitter, which is uniform between minus and plus its bound; frames of one port stay
in order. Then the link of the port where it leaves has to carry it: a token bucket as that of ``tc tbf``, in the form
of the generic cell rate algorithm (ITU-T I.371, annex A), with a queue that drops what would wait too long.
"""

from __future__ import annotations

import heapq
import random
import struct
from collections.abc import Iterator
from dataclasses import dataclass

VNET_NBYTES = 10
"""Bytes of ``struct virtio_net_hdr``, which stands before every frame."""
_VNET = struct.Struct("=BBHHHH")
_SEGMENTED = 0x7F
"""All kinds of segmentation; the remaining bit marks explicit congestion notification."""
_DESTINATION = slice(VNET_NBYTES, VNET_NBYTES + 6)
_PREFIX = b"\x02\x4d\x43\x4c"


@dataclass(frozen=True)
class LinkTiming:
    """Times of links in seconds.

    Attributes
    ----------
    delay, jitter
        One way between two ports.
    seconds_per_byte, burst_seconds
        Rate at which a port sends frames out, and how far ahead of it a port may be.
    queue_seconds
        How long a frame may wait for its port before it is dropped.
    """

    delay: float
    jitter: float
    seconds_per_byte: float
    burst_seconds: float
    queue_seconds: float


def hardware_address(port: int) -> bytes:
    """Return the Ethernet address of the device at a port."""
    return _PREFIX + port.to_bytes(2, "big")


def wire_nbytes(frame: bytes) -> int:
    """Return the bytes of a frame on a wire: one that the kernel has not cut yet counts as its segments."""
    _, segmentation, header, segment, _, _ = _VNET.unpack_from(frame)
    nbytes = len(frame) - VNET_NBYTES
    if not segmentation & _SEGMENTED or segment == 0:
        return nbytes
    return int(nbytes + header * (max(1, -(-(nbytes - header) // segment)) - 1))


class FrameSwitch:
    """Frames under way between ports, and the times at which they leave.

    Port 0 has no limit of its own. Frames carry ``virtio_net_hdr``; a frame to several addresses goes to all other
    ports, one to an unknown address to none.

    Parameters
    ----------
    ports
        Number of ports.
    timing
        Delay, jitter and rate of all links.
    seed
        Of the jitter.
    """

    def __init__(self, ports: int, timing: LinkTiming, seed: int = 0) -> None:
        self.dropped = 0
        self._timing = timing
        self._ports = {hardware_address(port): port for port in range(ports)}
        self._last_due = [0.0] * ports
        self._free = [0.0] * ports
        self._heap: list[tuple[float, int, int, bool, bytes]] = []
        self._serial = 0
        self._random = random.Random(seed)

    def arrive(self, source: int, frame: bytes, now: float) -> None:
        """Take a frame that came from the port `source` at `now`."""
        timing, due = self._timing, now
        if timing.jitter:
            due += timing.jitter * (2.0 * self._random.random() - 1.0)
        due = self._last_due[source] = max(self._last_due[source], due + timing.delay)
        destination = frame[_DESTINATION]
        if destination and destination[0] & 1:
            goals = [port for port in self._ports.values() if port != source]
        else:
            goals = [port] if (port := self._ports.get(destination, source)) != source else []
        for goal in goals:
            self._serial += 1
            heapq.heappush(self._heap, (due, self._serial, goal, False, frame))

    def leave(self, now: float) -> Iterator[tuple[int, bytes, float]]:
        """Yield the frames that leave until `now`: port, frame, and the time at which each had to leave."""
        heap = self._heap
        while heap and heap[0][0] <= now:
            due, serial, port, passed, frame = heapq.heappop(heap)
            leaves = due if passed else self._leaves(port, frame, due)
            if leaves == due:
                yield port, frame, due
            elif leaves > due:
                # The number stays: among frames of one time it keeps the order in which they came.
                heapq.heappush(heap, (leaves, serial, port, True, frame))

    def _leaves(self, port: int, frame: bytes, due: float) -> float:
        """Return when a port can send a frame, and take the room for it; less than `due` if it is dropped."""
        timing = self._timing
        if port == 0:
            return due
        free = self._free[port]
        leaves = max(due, free - timing.burst_seconds)
        if leaves - due > timing.queue_seconds:
            self.dropped += 1
            return -1.0
        self._free[port] = max(free, due) + wire_nbytes(frame) * timing.seconds_per_byte
        return leaves

    def next_time(self) -> float | None:
        """Return the time at which a frame is due next; None if there is none."""
        return self._heap[0][0] if self._heap else None
