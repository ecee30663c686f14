"""The relay's loop over sockets in place of devices, its settings and its counters; needs no root."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bench import link_relay
from bench.frame_switch import FrameSwitch, LinkTiming, hardware_address
from bench.link_relay import Relay, RelayCounters, RelaySettings
from tests.bench.test_frame_switch import EVERYBODY, frame, number_of

DELAY = 20e-3
TIMING = LinkTiming(DELAY, 0.0, 0.0, 0.0, 0.1)
DEADLINE = 20.0


@pytest.fixture
def cables() -> Iterator[list[tuple[socket.socket, socket.socket]]]:
    """Three pairs of sockets that keep frames whole: the relay's end, and the host's."""
    with contextlib.ExitStack() as stack:
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(3)]
        for one in (each for pair in pairs for each in pair):
            stack.enter_context(one).setblocking(False)
        yield pairs


def until(relay: Relay, condition: Callable[[], bool]) -> None:
    """Turn the relay until something is so."""
    end = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < end
        relay.turn(0.01)


def test_frames_come_whole_in_order_and_not_before_their_time(
    cables: list[tuple[socket.socket, socket.socket]],
) -> None:
    relay = Relay([ours.fileno() for ours, _ in cables], FrameSwitch(3, TIMING))
    begin = time.monotonic()
    for number in range(50):
        cables[1][1].send(frame(hardware_address(2), number, nbytes=64 + 10 * number))
    until(relay, lambda: relay.counters.frames > 0)
    assert time.monotonic() - begin >= DELAY
    until(relay, lambda: relay.counters.frames == 50)
    got = [cables[2][1].recv(1 << 16) for _ in range(50)]
    assert [number_of(each) for each in got] == list(range(50))
    assert [len(each) - 10 for each in got] == [64 + 10 * number for number in range(50)]
    assert relay.counters.nbytes == sum(64 + 10 * number for number in range(50))
    with pytest.raises(BlockingIOError):
        cables[0][1].recv(1)


def test_a_device_that_takes_nothing_stops_nobody(cables: list[tuple[socket.socket, socket.socket]]) -> None:
    relay = Relay([ours.fileno() for ours, _ in cables], FrameSwitch(3, TIMING))
    cables[0][1].close()
    cables[0][0].shutdown(socket.SHUT_WR)
    cables[1][1].send(frame(EVERYBODY))
    until(relay, lambda: relay.counters.frames == 2)
    assert cables[2][1].recv(1 << 16) == frame(EVERYBODY)


def test_a_frame_that_waited_unseen_is_late(
    cables: list[tuple[socket.socket, socket.socket]], monkeypatch: pytest.MonkeyPatch
) -> None:
    relay = Relay([ours.fileno() for ours, _ in cables], FrameSwitch(3, TIMING))
    monkeypatch.setattr(link_relay, "LATE_SECONDS", 1e9)
    cables[1][1].send(frame(hardware_address(2)))
    until(relay, lambda: relay.counters.frames == 1)
    assert not relay.counters.late
    monkeypatch.setattr(link_relay, "LATE_SECONDS", 10e-3)
    relay.turn(0.0)
    cables[1][1].send(frame(hardware_address(2)))
    time.sleep(30e-3)
    relay.turn(0.0)
    assert relay.counters.late == 1
    assert relay.counters.most_late >= 20e-3
    assert relay.counters.too_slow
    assert "too slow" in relay.counters.describe()


def test_settings_and_counters_are_read_as_they_are_written(tmp_path: Path) -> None:
    settings = RelaySettings([(1, "bridge"), (7, "eth0")], TIMING, "somewhere")
    assert RelaySettings.from_json(settings.to_json()) == settings
    counters = RelayCounters(10, 1000, 2, 1, 0.5)
    (tmp_path / "relay").write_bytes(counters.pack())
    assert RelayCounters.read(tmp_path / "relay") == counters
    assert counters.since(RelayCounters(4, 400, 2, 0, 0.1)) == RelayCounters(6, 600, 0, 1, 0.5)


def test_one_late_frame_in_a_thousand_is_in_time() -> None:
    assert not RelayCounters(1000, 1, 1).too_slow
    assert RelayCounters(1000, 1, 11).too_slow
    assert not RelayCounters().too_slow
