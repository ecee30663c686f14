"""Relay of frames between emulated hosts: the switch of a cluster whose links have a delay.

Every host's network device, and the switch's own, is a TAP device of this process. It reads the frames that they send,
holds each until its time (:mod:`bench.frame_switch`), and writes it to the device that it is for. Frames stay as long
as the kernel's TCP makes them (``virtio_net_hdr``), so that one read and one write carry up to 64 KB. While frames are
under way, it looks for more every :data:`GATHER_SECONDS` at most, and takes all that there are.

:class:`bench.namespaces.Hosts` starts it inside the switch's namespaces, whose end is its end. It counts frames that
were not in time in a file that others read: then it, or the machine, is too slow for the rate.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import json
import mmap
import os
import select
import struct
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.frame_switch import VNET_NBYTES, FrameSwitch, LinkTiming

GATHER_SECONDS = 0.1e-3
LATE_SECONDS = 1e-3
"""A frame that leaves so much after its time, or is found so long after it came, is late."""
_LATE_SHARE = 0.01
_FRAME_NBYTES = VNET_NBYTES + 14 + (64 << 10)
_AT_ONCE = 64
"""Frames read from one device before it is another's turn."""
_TUN = "/dev/net/tun"
_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_TAP_NO_INFO_VNET = 0x0002 | 0x1000 | 0x4000
_CHECKSUM_AND_SEGMENTATION = 0x1 | 0x2 | 0x4
_CLONE_NEWNET = 0x40000000
_COUNTERS = struct.Struct("=QQQQd")


@dataclass
class RelayCounters:
    """Frames and bytes that left, those that were late or dropped, and the most seconds that one was late."""

    frames: int = 0
    nbytes: int = 0
    late: int = 0
    dropped: int = 0
    most_late: float = 0.0

    @classmethod
    def read(cls, path: Path) -> RelayCounters:
        """Return what a relay has written so far."""
        frames, nbytes, late, dropped, most_late = _COUNTERS.unpack(path.read_bytes())
        return cls(frames, nbytes, late, dropped, most_late)

    def since(self, earlier: RelayCounters) -> RelayCounters:
        """Return the counts after `earlier`; the most seconds stay those of the whole time."""
        frames, nbytes, late, dropped = (
            now - then for now, then in zip(self._counts(), earlier._counts(), strict=True)
        )
        return RelayCounters(frames, nbytes, late, dropped, self.most_late)

    def _counts(self) -> tuple[int, int, int, int]:
        return self.frames, self.nbytes, self.late, self.dropped

    @property
    def too_slow(self) -> bool:
        """True if so many frames were late that times are not those of the delay and rate that were set."""
        return self.late > _LATE_SHARE * self.frames

    def describe(self) -> str:
        """Return the counts as a line."""
        share = self.late / max(1, self.frames)
        line = f"relay: {self.frames:,} frames of {self.nbytes / 1e6:,.1f} MB, {self.dropped:,} dropped by full links; "
        line += f"{share:.2%} late by more than {LATE_SECONDS * 1e3:g} ms, the latest by {self.most_late * 1e3:.1f} ms"
        return line + (": it, or this machine, is too slow for the rate" if self.too_slow else "")

    def pack(self) -> bytes:
        """Return the content of the file."""
        return _COUNTERS.pack(*self._counts(), self.most_late)


@dataclass(frozen=True)
class RelaySettings:
    """Settings of a relay: devices as pairs of a process in their network and their name, times, file of counters."""

    devices: Sequence[tuple[int, str]]
    timing: LinkTiming
    counters: str

    def to_json(self) -> str:
        """Return it as an argument of this program."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> RelaySettings:
        """Return what `to_json` has written."""
        found = json.loads(text)
        devices = [(int(pid), str(name)) for pid, name in found["devices"]]
        return cls(devices, LinkTiming(**found["timing"]), found["counters"])


def open_device(pid: int, name: str) -> int:
    """Make a TAP device in the network of a process; return the descriptor that is its cable.

    Raises
    ------
    OSError
        If the system does not allow it.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    with contextlib.closing(os.fdopen(os.open(f"/proc/{pid}/ns/net", os.O_RDONLY), "rb")) as network:
        if libc.setns(network.fileno(), _CLONE_NEWNET):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), network.name)
    device = os.open(_TUN, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _TAP_NO_INFO_VNET))
    fcntl.ioctl(device, _TUNSETOFFLOAD, _CHECKSUM_AND_SEGMENTATION)
    return device


class Relay:
    """Loop over descriptors, each the cable of the port of its place.

    Parameters
    ----------
    devices
        Descriptors that do not block; each read gives a frame, each write takes one.
    switch
        Says when frames leave.
    """

    def __init__(self, devices: Sequence[int], switch: FrameSwitch) -> None:
        self.counters = RelayCounters()
        self._devices = list(devices)
        self._ports = {device: port for port, device in enumerate(devices)}
        self._switch = switch
        self._looked = time.monotonic()

    def turn(self, longest: float | None = None) -> None:
        """Wait for the next frame to come or to leave, at most `longest` seconds, then handle all that do."""
        upcoming, before = self._switch.next_time(), time.monotonic()
        if upcoming is not None:
            time.sleep(max(0.0, min(GATHER_SECONDS, upcoming - before)))
            before = time.monotonic()
            longest = max(0.0, upcoming - before)
        readable = select.select(self._devices, [], [], longest)[0]
        now = time.monotonic()
        if readable:
            self._read(readable, now, before - self._looked)
        self._looked = now
        self._write()

    def _read(self, readable: Sequence[int], now: float, unseen: float) -> None:
        arrive, counters, found = self._switch.arrive, self.counters, 0
        for device in readable:
            port = self._ports[device]
            with contextlib.suppress(BlockingIOError):
                for _ in range(_AT_ONCE):
                    arrive(port, os.read(device, _FRAME_NBYTES), now)
                    found += 1
        if unseen > LATE_SECONDS:
            counters.late += found
            counters.most_late = max(counters.most_late, unseen)

    def _write(self) -> None:
        counters, devices, late = self.counters, self._devices, 0.0
        now = time.monotonic()
        for port, frame, leaves in self._switch.leave(now):
            # A device that is not up yet, or no longer, takes nothing; neither does one that is full.
            with contextlib.suppress(OSError):
                os.write(devices[port], frame)
            counters.frames += 1
            counters.nbytes += len(frame) - VNET_NBYTES
            if now - leaves > LATE_SECONDS:
                counters.late += 1
                late = max(late, now - leaves)
        counters.dropped = self._switch.dropped
        counters.most_late = max(counters.most_late, late)


def _come_first() -> None:
    """Run before the ranks, as hardware does, where that is allowed."""
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))


def main(argv: Sequence[str]) -> int:
    """Relay until the end of its namespaces; print the number of this process when all devices are there."""
    settings = RelaySettings.from_json(argv[0])
    try:
        devices = [open_device(pid, name) for pid, name in settings.devices]
    except OSError as error:
        print(f"{error.filename or _TUN}: {error.strerror}", flush=True)
        return 1
    relay = Relay(devices, FrameSwitch(len(devices), settings.timing))
    _come_first()
    gc.disable()
    with Path(settings.counters).open("w+b") as file:
        file.write(relay.counters.pack())
        file.flush()
        with mmap.mmap(file.fileno(), _COUNTERS.size) as memory:
            print(os.getpid(), flush=True)
            while True:
                relay.turn()
                memory[:] = relay.counters.pack()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
