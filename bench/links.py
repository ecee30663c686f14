"""Settings of emulated links: rate, delay and jitter, as commands for ``tc`` and as times for a relay."""

from __future__ import annotations

from dataclasses import dataclass

from bench.frame_switch import LinkTiming

MAX_DELAY_SECONDS = 1.0
MAX_RELAYED_GBIT = 10.0
"""Beyond this rate of a link no relay was seen to be in time, however few the hosts."""
_BURST_SECONDS = 0.5e-3
"""What a link may send at once after a pause: enough for a late timer, little beside a message worth measuring."""
_BURST_SHARE, _MAX_BURST_SECONDS = 0.2, 2e-3
"""Share of a delay that a burst may take, and its bound: a relay needs half of the time for frames twice as long."""
_MIN_BURST_NBYTES = 16 << 10
_BUNDLES = 4
"""A burst is at least so many bundles of packets, as they are handed to the link; else it cannot be used up."""
_MAX_BUNDLE_NBYTES = 64 << 10
_QUEUE_SECONDS = 0.1
"""How long a packet may wait: several senders fill one link, and what is dropped must be sent again."""
_PACKET_NBYTES = 1500
_WINDOW_NBYTES = 4 << 20
"""What every kernel lets one connection have under way."""


@dataclass(frozen=True)
class LinkDelay:
    """Time of every frame from one host to another.

    Attributes
    ----------
    seconds, jitter
        One way; uniform between ``seconds - jitter`` and ``seconds + jitter``. Frames of a host stay in order.

    Raises
    ------
    ValueError
        If `seconds` is not between 0 and :data:`MAX_DELAY_SECONDS`, or `jitter` not between 0 and `seconds`.
    """

    seconds: float = 0.0
    jitter: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.seconds <= MAX_DELAY_SECONDS:
            raise ValueError(f"delay: {self.seconds:g} s is not between 0 and {MAX_DELAY_SECONDS:g} s")
        if not 0.0 <= self.jitter <= self.seconds:
            raise ValueError(f"jitter: {self.jitter:g} s is not between 0 and the delay, {self.seconds:g} s")

    def __bool__(self) -> bool:
        return self.seconds > 0.0


NO_DELAY = LinkDelay()


def burst(gbit: float, delay: LinkDelay = NO_DELAY) -> int:
    """Return how many bytes a link may send at once."""
    seconds = max(_BURST_SECONDS, _BURST_SHARE * delay.seconds)
    return max(_MIN_BURST_NBYTES, int(gbit * 1e9 / 8 * min(seconds, _MAX_BURST_SECONDS)))


def bundle(gbit: float, delay: LinkDelay = NO_DELAY) -> int:
    """Return how many bytes of packets the kernel may hand to a link as one."""
    return min(_MAX_BUNDLE_NBYTES, burst(gbit, delay) // _BUNDLES)


def limit(device: str, gbit: float, delay: LinkDelay = NO_DELAY) -> str:
    """Return the command for ``tc`` that limits what a device sends."""
    rate, queue = f"{gbit * 1e9:.0f}bit", f"{_QUEUE_SECONDS * 1e3:.0f}ms"
    return f"qdisc replace dev {device} root tbf rate {rate} burst {burst(gbit, delay)} latency {queue}"


def limit_and_delay(device: str, gbit: float, delay: LinkDelay) -> str:
    """Return the command for ``tc`` by which netem limits and delays what a device sends.

    With a rate, netem keeps packets in order whatever the jitter (``netem_enqueue`` of Linux).
    """
    times = f"{delay.seconds * 1e6:.0f}us" + (f" {delay.jitter * 1e6:.0f}us" if delay.jitter else "")
    packets = 1000 + int(gbit * 1e9 / 8 * (delay.seconds + delay.jitter + _QUEUE_SECONDS) / _PACKET_NBYTES)
    return f"qdisc replace dev {device} root netem delay {times} rate {gbit * 1e9:.0f}bit limit {packets}"


def timing(gbit: float, delay: LinkDelay) -> LinkTiming:
    """Return the times of a relay's links.

    Raises
    ------
    ValueError
        If no relay carries such a rate.
    """
    if gbit > MAX_RELAYED_GBIT:
        most = f"{MAX_RELAYED_GBIT:g}, the most that a link with a delay carries on a kernel without netem"
        raise ValueError(f"gbit: {gbit:g} is more than {most}")
    per_byte = 8e-9 / gbit
    return LinkTiming(delay.seconds, delay.jitter, per_byte, burst(gbit, delay) * per_byte, _QUEUE_SECONDS)


def window_nbytes(gbit: float, delay: LinkDelay) -> int:
    """Return how many bytes one connection may have under way: twice what the link carries in a round trip."""
    round_trip = 2 * (delay.seconds + delay.jitter)
    return max(_WINDOW_NBYTES, int(2 * gbit * 1e9 / 8 * round_trip))
