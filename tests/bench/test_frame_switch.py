"""Delays, order and rates of frames between ports; times are given, no clock runs."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import pytest

from bench.frame_switch import FrameSwitch, LinkTiming, hardware_address, wire_nbytes

PORTS = 4
DELAY, JITTER = 5e-3, 1e-3
FREE = LinkTiming(DELAY, 0.0, 0.0, 0.0, 0.1)
EVERYBODY = b"\xff" * 6


def frame(goal: bytes, number: int = 0, nbytes: int = 64, segment: int = 0, header: int = 54) -> bytes:
    """Return a frame of `nbytes` to an address, with a number in it; `segment` marks one that is not cut yet."""
    vnet = struct.pack("=BBHHHH", 0, 1 if segment else 0, header, segment, 0, 0)
    return vnet + (goal + bytes(6) + struct.pack("<I", number)).ljust(nbytes, b"\0")


def number_of(taken: bytes) -> int:
    return int(struct.unpack_from("<I", taken, 22)[0])


def everything(switch: FrameSwitch, tick: float = 0.0) -> Iterator[tuple[int, bytes, float]]:
    """Yield all frames with the time of the look that found them, which is `tick` late."""
    while (upcoming := switch.next_time()) is not None:
        for port, taken, leaves in switch.leave(upcoming + tick):
            assert leaves <= upcoming + tick
            yield port, taken, upcoming + tick


def test_a_frame_leaves_after_the_delay_at_the_port_of_its_address() -> None:
    switch = FrameSwitch(PORTS, FREE)
    switch.arrive(1, frame(hardware_address(3)), 1.0)
    assert switch.next_time() == 1.0 + DELAY
    assert list(switch.leave(1.0 + DELAY - 1e-6)) == []
    assert list(switch.leave(1.0 + DELAY)) == [(3, frame(hardware_address(3)), 1.0 + DELAY)]
    assert switch.next_time() is None


def test_frames_to_everybody_and_to_nobody() -> None:
    switch = FrameSwitch(PORTS, FREE)
    switch.arrive(1, frame(EVERYBODY), 0.0)
    assert [port for port, _, _ in everything(switch)] == [0, 2, 3]
    for goal in (hardware_address(1), hardware_address(PORTS), bytes(6), b""):
        switch.arrive(1, frame(goal)[: 10 + len(goal)] if not goal else frame(goal), 0.0)
    assert list(everything(switch)) == []


@pytest.mark.parametrize("tick", [0.0, 0.3e-3, 20e-3])
@pytest.mark.parametrize("queued", [False, True])
def test_frames_of_a_port_stay_in_order_under_jitter(tick: float, queued: bool) -> None:
    per_byte, burst = (8e-9, 0.2e-3) if queued else (0.0, 0.0)
    switch = FrameSwitch(PORTS, LinkTiming(DELAY, JITTER, per_byte, burst, 1e9), seed=7)
    for number in range(500):
        for source in (1, 2):
            nbytes = 60 + 1400 * (number % 3 == source % 2)
            switch.arrive(source, frame(hardware_address(3), 1000 * source + number, nbytes), number * 10e-6)
    found = [number_of(taken) for _, taken, _ in everything(switch, tick)]
    for source in (1, 2):
        own = [number % 1000 for number in found if number // 1000 == source]
        assert own == list(range(500))


def test_jitter_is_within_its_bounds_and_on_both_sides() -> None:
    switch = FrameSwitch(PORTS, LinkTiming(DELAY, JITTER, 0.0, 0.0, 0.1), seed=1)
    took = []
    for number in range(300):
        switch.arrive(1, frame(hardware_address(2)), float(number))
        took += [leaves - number for _, _, leaves in switch.leave(number + 1.0)]
    assert len(took) == 300
    assert DELAY - JITTER <= min(took) < DELAY - 0.9 * JITTER
    assert DELAY + 0.9 * JITTER < max(took) <= DELAY + JITTER
    assert abs(sum(took) / 300 - DELAY) < 0.1 * JITTER * 2


@pytest.mark.parametrize("tick", [0.0, 0.2e-3])
def test_what_several_ports_send_to_one_does_not_exceed_its_rate(tick: float) -> None:
    per_byte, burst = 8e-9, 0.5e-3
    switch = FrameSwitch(PORTS, LinkTiming(DELAY, 0.0, per_byte, burst, 10.0))
    for number in range(1000):
        for source in (1, 2):
            switch.arrive(source, frame(hardware_address(3), nbytes=1500), number * 20e-6)
    times = [at for _, _, at in everything(switch, tick)]
    assert len(times) == 2000
    seconds = 1500 * per_byte
    for first in range(0, 2000, 50):
        for last in range(first + 49, 2000, 50):
            carried = (last - first + 1) * seconds
            assert carried <= times[last] - times[first] + burst + seconds + tick + 1e-9
    # Nothing is lost of the rate either: the link is busy to the end.
    assert times[-1] - times[0] <= 2000 * seconds + tick


def test_port_0_has_no_rate_of_its_own() -> None:
    switch = FrameSwitch(2, LinkTiming(DELAY, 0.0, 1.0, 0.0, 10.0))
    for _ in range(3):
        switch.arrive(1, frame(hardware_address(0)), 0.0)
    assert [at for _, _, at in everything(switch)] == [DELAY] * 3


def test_what_would_wait_too_long_is_dropped_and_counted() -> None:
    switch = FrameSwitch(PORTS, LinkTiming(DELAY, 0.0, 1e-5, 0.0, 0.1))
    for number in range(20):  # 10 ms each
        switch.arrive(1, frame(hardware_address(2), number, nbytes=1000), 0.0)
    assert [number_of(taken) for _, taken, _ in everything(switch)] == list(range(11))
    assert switch.dropped == 9
    switch.arrive(1, frame(hardware_address(2)), 1.0)
    assert len(list(everything(switch))) == 1


def test_a_frame_that_is_not_cut_yet_counts_as_its_segments() -> None:
    assert wire_nbytes(frame(EVERYBODY, nbytes=1000)) == 1000
    assert wire_nbytes(frame(EVERYBODY, nbytes=54 + 3 * 1448, segment=1448)) == 3 * (54 + 1448)
    assert wire_nbytes(frame(EVERYBODY, nbytes=54 + 2 * 1448 + 1, segment=1448)) == 2 * (54 + 1448) + 55
    assert wire_nbytes(frame(EVERYBODY, nbytes=54, segment=1448)) == 54
