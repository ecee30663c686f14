"""Delays of links, and the commands and times that they become."""

from __future__ import annotations

import pytest

from bench.links import MAX_RELAYED_GBIT, NO_DELAY, LinkDelay, bundle, burst, limit_and_delay, timing, window_nbytes


@pytest.mark.parametrize(
    ("seconds", "jitter", "says"),
    [(-1.0, 0.0, "delay: -1 s"), (2.0, 0.0, "delay: 2 s"), (float("nan"), 0.0, "delay: nan s"),
     (0.005, 0.006, "jitter: 0.006 s .* 0.005 s"), (0.0, 0.001, "jitter: 0.001 s"), (0.1, -0.1, "jitter: -0.1 s")],
)  # fmt: skip
def test_wrong_delays(seconds: float, jitter: float, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        LinkDelay(seconds, jitter)


def test_only_a_delay_is_true() -> None:
    assert not NO_DELAY
    assert LinkDelay(1e-6)


def test_netem_delays_and_limits_with_room_for_what_is_under_way() -> None:
    command = limit_and_delay("port1", 1.0, LinkDelay(0.005, 0.001))
    assert command == "qdisc replace dev port1 root netem delay 5000us 1000us rate 1000000000bit limit 9833"
    assert " delay 5000us rate " in limit_and_delay("port1", 1.0, LinkDelay(0.005))


def test_a_relay_has_the_rate_and_refuses_what_it_cannot_carry() -> None:
    times = timing(1.0, LinkDelay(0.005, 0.001))
    assert (times.delay, times.jitter) == (0.005, 0.001)
    assert times.seconds_per_byte == pytest.approx(8e-9)
    assert times.burst_seconds == pytest.approx(1e-3)
    with pytest.raises(ValueError, match="gbit: 11 is more than 10"):
        timing(MAX_RELAYED_GBIT + 1.0, LinkDelay(0.005))


def test_bursts_are_longer_where_frames_take_longer_anyway() -> None:
    assert burst(1.0) == burst(1.0, LinkDelay(1e-3)) == 62_500
    assert burst(1.0, LinkDelay(5e-3)) == 125_000
    assert burst(1.0, LinkDelay(0.1)) == 250_000
    assert bundle(1.0, LinkDelay(5e-3)) == 31_250


def test_a_window_has_room_for_a_round_trip() -> None:
    assert window_nbytes(0.1, LinkDelay(0.005)) == 4 << 20
    assert window_nbytes(10.0, LinkDelay(0.1)) == pytest.approx(2 * 0.2 * 1.25e9)
