"""Hosts that are none: network namespaces of this machine, joined by links of a given rate and delay.

One namespace holds a switch (a bridge), and one each host: its own network, host name, process numbers, System V
memory and /dev/shm, so that processes of different hosts reach each other through their links only. ``tbf`` limits both
directions of every link. The machine's own network is not touched::

    switch   10.77.0.254    bridge -- port1 ======== eth0    10.77.0.1   host1
                                   -- port2 ======== eth0    10.77.0.2   host2

A delay comes on the way to each host: at its port by ``netem``, which limits the rate there too. Where the kernel has
no netem, a relay (:mod:`bench.link_relay`) takes the place of bridge and ports: ``bridge`` and each ``eth0`` are then
TAP devices of it, and it limits the rate of what a host receives.

Nothing has a name in the file system. The first process of each namespace of process numbers ends when this process
ends, however that happens, since then its input does; the kernel then kills all others there and takes the
namespaces with their devices away. The hosts' process numbers lie within the switch's, so the end of that one process
is the end of everything.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path

from bench.frame_switch import LinkTiming, hardware_address
from bench.link_relay import RelayCounters, RelaySettings
from bench.links import NO_DELAY, LinkDelay, bundle, limit, limit_and_delay, timing, window_nbytes

MAX_HOSTS = 200
SUBNET = "10.77.0"
SWITCH = "switch"
DEVICE, BRIDGE = "eth0", "bridge"
TOOLS = ("ip", "tc", "unshare", "nsenter", "mount")
PACKAGES = {"ip": "iproute2", "tc": "iproute2"}
_DEADLINE = 20.0
"""Seconds for each command that sets something up, and for the end of what was started."""
_FOLDER = "mpicoll-cluster-"
RELAY, RELAY_PROGRAM = "relay", "bench.link_relay"
"""Name of the relay and of the file of its counters, and its module."""
_HERE = Path(__file__).resolve().parent.parent
_SWITCH_ADDRESS = f"addr add {SUBNET}.254/24 dev {BRIDGE}"
_RELAY_QUEUE = 10000
"""Packets that a TAP device keeps until the relay reads them."""
_NEW = ("unshare", "--net", "--uts", "--ipc", "--mount", "--pid", "--fork")
_ENTER = "nsenter --target {} --net --uts --ipc --mount --pid --"
_HOLD = """
read -r pid rest < /proc/self/stat
mount -t proc proc /proc && mount -t tmpfs tmpfs /dev/shm && mount --bind "$1" /etc/hosts || exit 1
echo "$0" > /proc/sys/kernel/hostname && ip link set lo up || exit 1
cd /proc/sys/net/ipv4 && echo reno > tcp_congestion_control && echo 131072 > tcp_limit_output_bytes
echo "$pid"
exec cat > /dev/null
"""
"""The first process: says which number it has outside, before it sees its own, and lasts as long as its input.
Every kernel has Reno; nothing is lost on these links that congestion control would have to find out about. A socket
may queue 1 ms of data at the link, as where queues are fair: else an acknowledgement, or the answer that starts another
message, stands behind megabytes, and a ring of 4 hosts reaches 60 % of the rate instead of 90 %."""
_WINDOW = """
cd /proc/sys/net/ipv4 && echo "4096 16384 $0" > tcp_wmem && echo "4096 131072 $0" > tcp_rmem
"""
_AGENT = """#!/bin/sh
# Run a command on a host, called as ssh is: options, host, words of a command line.
while [ "${{1#-}}" != "$1" ]; do shift; done
host=$1; shift
export TMPDIR="{folder}/$host"
exec nsenter --target "$(cat "$TMPDIR/pid")" --net --uts --ipc --mount --pid -- sh -c "cd '$PWD' && $*"
"""


class NamespaceError(RuntimeError):
    """Something that hosts need cannot be had; the message is one line."""


class Hosts:
    """Hosts and their switch; a context manager.

    Parameters
    ----------
    number
        How many hosts.
    gbit
        10^9 bits per second of each link, each way.
    delay
        What every frame takes from one host to another.

    Attributes
    ----------
    names
        ``host1`` and so on.
    agent
        Path of a program to be called like ssh inside the switch: ``agent host1 command``.
    delayed_by
        ``"netem"``, ``"relay"``, or None without a delay.

    Raises
    ------
    ValueError
        If there cannot be such a number of hosts, or such a rate.
    NamespaceError
        If the machine does not allow it.
    """

    def __init__(self, number: int, gbit: float, delay: LinkDelay = NO_DELAY) -> None:
        if not 1 <= number <= MAX_HOSTS:
            raise ValueError(f"hosts: {number} is not between 1 and {MAX_HOSTS}")
        if not 0.001 <= gbit <= 1000:
            raise ValueError(f"gbit: {gbit} is not between 0.001 and 1000")
        self.names = [f"host{index + 1}" for index in range(number)]
        self.delayed_by: str | None = None
        self.folder = _make_folder()
        self.agent = str(self.folder / "agent")
        self._holders: list[subprocess.Popen[bytes]] = []
        reading, self._life = os.pipe()
        try:
            self._make(gbit, delay, reading)
        except BaseException:
            self.close()
            raise
        finally:
            os.close(reading)

    def _make(self, gbit: float, delay: LinkDelay, reading: int) -> None:
        _write_files(self.folder, self.names)
        self.enter = _ENTER.format(self._hold(SWITCH, [], reading)).split()
        pids = [self._hold(name, self.enter, reading) for name in self.names]
        for name, pid in zip(self.names, pids, strict=True):
            (self.folder / name / "pid").write_text(f"{pid}\n")
        if delay:
            self.delayed_by = "netem" if _has_netem(self.enter) else RELAY
        if self.delayed_by == RELAY:
            self._connect_by_relay(pids, timing(gbit, delay), reading)
        else:
            self._connect_by_bridge(pids, gbit, delay)
        for number, pid in enumerate(pids, 1):
            inside = [*self.enter, *_ENTER.format(pid).split()]
            own = f"addr add {SUBNET}.{number}/24 dev {DEVICE}"
            _batch(inside, "ip", [own, f"link set {DEVICE} gso_max_size {bundle(gbit, delay)} up"])
            _batch(inside, "tc", [limit(DEVICE, gbit, delay)])
            if delay:
                _run([*inside, "sh", "-c", _WINDOW, str(window_nbytes(gbit, delay))], "sh")
        self._first = set(self._processes())

    def _connect_by_bridge(self, pids: Sequence[int], gbit: float, delay: LinkDelay) -> None:
        links = [f"link add {BRIDGE} type bridge", _SWITCH_ADDRESS, f"link set {BRIDGE} up"]
        for number, pid in enumerate(pids, 1):
            links.append(f"link add port{number} type veth peer name {DEVICE} netns {pid}")
            links.append(f"link set port{number} master {BRIDGE} up")
        _batch(self.enter, "ip", links)
        ports = [f"port{number}" for number in range(1, len(pids) + 1)]
        limits = [limit_and_delay(port, gbit, delay) if delay else limit(port, gbit) for port in ports]
        _batch(self.enter, "tc", limits)

    def _connect_by_relay(self, pids: Sequence[int], timing: LinkTiming, reading: int) -> None:
        devices = [(1, BRIDGE), *((pid, DEVICE) for pid in pids)]
        settings = RelaySettings(devices, timing, str(self.folder / RELAY))
        program = [sys.executable, "-m", RELAY_PROGRAM, settings.to_json()]
        self._start(RELAY, [*self.enter, "sh", "-c", 'cd "$0" && exec "$@"', str(_HERE), *program], reading)
        _batch(self.enter, "ip", [_hardware(BRIDGE, 0), _SWITCH_ADDRESS, f"link set {BRIDGE} up"])
        for number, pid in enumerate(pids, 1):
            _batch([*self.enter, *_ENTER.format(pid).split()], "ip", [_hardware(DEVICE, number)])

    def _hold(self, name: str, outside: Sequence[str], reading: int) -> int:
        """Start the first process of a host or of the switch; return its number as seen from outside."""
        return self._start(name, [*outside, *_NEW, "sh", "-c", _HOLD, name, str(self.folder / "hosts")], reading)

    def _start(self, name: str, command: Sequence[str], reading: int) -> int:
        """Start a process that lasts as long as the hosts; return the number that it says first."""
        holder = subprocess.Popen(
            command, stdin=reading, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
        )
        self._holders.append(holder)
        assert holder.stdout is not None
        if not select.select([holder.stdout], [], [], _DEADLINE)[0]:
            raise NamespaceError(f"{name}: nothing was heard of it for {_DEADLINE:.0f} s")
        line = holder.stdout.readline().decode().strip()
        if not line.isdigit():
            raise NamespaceError(f"{name} cannot be made: {line or 'it has ended'}")
        return int(line)

    def check(self) -> None:
        """Make sure that switch, hosts and relay are there.

        Raises
        ------
        NamespaceError
            If one of them has ended; the message has the last line that it wrote.
        """
        for holder in self._holders:
            if holder.poll() is not None:
                assert holder.stdout is not None
                said = holder.stdout.read().decode().strip().splitlines()
                raise NamespaceError(f"a process that holds the links has ended: {said[-1] if said else 'no message'}")

    def relayed(self) -> RelayCounters:
        """Return what the relay has counted so far; zeros without one."""
        return RelayCounters.read(self.folder / RELAY) if self.delayed_by == RELAY else RelayCounters()

    def _processes(self) -> list[int]:
        """Return all processes of switch and hosts that live, numbered as in the switch."""
        inside = Path(f"/proc/{self.enter[2]}/root/proc")
        return [int(path.name) for path in inside.iterdir() if path.name.isdigit() and _lives(path)]

    def kill_programs(self) -> None:
        """Kill whatever runs on the hosts and the switch.

        Raises
        ------
        NamespaceError
            If something is left.
        """
        for _ in _until(_DEADLINE):
            left = sorted(set(self._processes()) - self._first)
            if not left:
                return
            kill = ["sh", "-c", 'kill -KILL "$@"', "sh", *map(str, left)]
            subprocess.run([*self.enter, *kill], capture_output=True, timeout=_DEADLINE, check=False)
        raise NamespaceError(f"processes {left} of the emulated cluster cannot be killed")

    def close(self) -> None:
        """Take everything away, whatever runs there."""
        if self._life >= 0:
            os.close(self._life)
            self._life = -1
        for holder in self._holders:
            try:
                holder.wait(_DEADLINE)
            except subprocess.TimeoutExpired:
                os.killpg(holder.pid, 9)
                holder.wait(_DEADLINE)
            if holder.stdout is not None:
                holder.stdout.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _lives(process: Path) -> bool:
    """Say whether a process, given by its folder in /proc, is more than an exit status that nobody has asked for."""
    try:
        return (process / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _until(seconds: float) -> Iterator[None]:
    """Yield at once and then every few milliseconds until the time is over."""
    end = time.monotonic() + seconds
    while True:
        yield
        if time.monotonic() > end:
            return
        time.sleep(0.005)


def _make_folder() -> Path:
    """Make the folder of this cluster, and remove those that killed processes have left behind."""
    for path in Path(tempfile.gettempdir()).glob(f"{_FOLDER}*"):
        owner = path.name.removeprefix(_FOLDER).partition("-")[0]
        if owner.isdigit() and not _lives(Path("/proc", owner)):
            shutil.rmtree(path, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{_FOLDER}{os.getpid()}-"))


def _write_files(folder: Path, names: Sequence[str]) -> None:
    addresses = [f"{SUBNET}.{number} {name}" for number, name in enumerate(names, 1)]
    lines = ["127.0.0.1 localhost", f"{SUBNET}.254 {SWITCH}", *addresses]
    (folder / "hosts").write_text("\n".join(lines) + "\n")
    for name in (SWITCH, *names):
        (folder / name).mkdir()
    agent = folder / "agent"
    agent.write_text(_AGENT.format(folder=folder))
    agent.chmod(0o755)


def _hardware(device: str, port: int) -> str:
    address = hardware_address(port).hex(":")
    return f"link set {device} address {address} txqueuelen {_RELAY_QUEUE}"


def _has_netem(inside: Sequence[str]) -> bool:
    """Say whether the kernel has netem, by giving it to a loopback device."""
    try:
        _batch(inside, "tc", ["qdisc add dev lo root netem delay 1ms", "qdisc del dev lo root"])
    except NamespaceError:
        return False
    return True


def _batch(inside: Sequence[str], tool: str, lines: Sequence[str]) -> None:
    _run([*inside, tool, "-batch", "-"], tool, "\n".join(lines) + "\n")


def _run(command: Sequence[str], name: str, given: str = "") -> None:
    done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=_DEADLINE, check=False)
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if not line.startswith("Command failed")]
        raise NamespaceError(f"{name} fails: {' '.join(said) or f'exit status {done.returncode}'}")


@lru_cache(maxsize=1)
def unavailable() -> str | None:
    """Return why hosts cannot be made here, None if they can: one is made to see."""
    if not sys.platform.startswith("linux"):
        return f"an emulated cluster needs Linux, this is {sys.platform}"
    if os.geteuid() != 0:
        return "an emulated cluster needs root, who alone may make network namespaces"
    for tool in TOOLS:
        if shutil.which(tool) is None:
            return f"an emulated cluster needs the command {tool} (package {PACKAGES.get(tool, 'util-linux')})"
    try:
        with contextlib.closing(Hosts(1, 1.0)):
            return None
    except (NamespaceError, OSError, subprocess.TimeoutExpired) as error:
        return f"an emulated cluster is not possible: {error}"
