"""Hosts that are none: network namespaces of this machine, joined by links of a given rate.

One namespace holds a switch (a bridge), and one each host: its own network, host name, process numbers, System V
memory and /dev/shm, so that processes of different hosts reach each other through their links only. ``tbf`` limits both
directions of every link. The machine's own network is not touched::

    switch   10.77.0.254    bridge -- port1 ======== eth0    10.77.0.1   host1
                                   -- port2 ======== eth0    10.77.0.2   host2

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

MAX_HOSTS = 200
SUBNET = "10.77.0"
SWITCH = "switch"
DEVICE, BRIDGE = "eth0", "bridge"
TOOLS = ("ip", "tc", "unshare", "nsenter", "mount")
PACKAGES = {"ip": "iproute2", "tc": "iproute2"}
_DEADLINE = 20.0
"""Seconds for each command that sets something up, and for the end of what was started."""
_FOLDER = "mpicoll-cluster-"
_BURST_SECONDS = 0.5e-3
"""What a link may send at once after a pause: enough for a late timer, little beside a message worth measuring."""
_MIN_BURST_NBYTES = 16 << 10
_BUNDLES = 4
"""A burst is at least so many bundles of packets, as they are handed to the link; else it cannot be used up."""
_MAX_BUNDLE_NBYTES = 64 << 10
_QUEUE = "100ms"
"""How long a packet may wait: several senders fill one link, and what is dropped must be sent again."""
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

    Attributes
    ----------
    names
        ``host1`` and so on.
    agent
        Path of a program to be called like ssh inside the switch: ``agent host1 command``.

    Raises
    ------
    ValueError
        If there cannot be such a number of hosts, or such a rate.
    NamespaceError
        If the machine does not allow it.
    """

    def __init__(self, number: int, gbit: float) -> None:
        if not 1 <= number <= MAX_HOSTS:
            raise ValueError(f"hosts: {number} is not between 1 and {MAX_HOSTS}")
        if not 0.001 <= gbit <= 1000:
            raise ValueError(f"gbit: {gbit} is not between 0.001 and 1000")
        self.names = [f"host{index + 1}" for index in range(number)]
        self.folder = _make_folder()
        self.agent = str(self.folder / "agent")
        self._holders: list[subprocess.Popen[bytes]] = []
        reading, self._life = os.pipe()
        try:
            self._make(gbit, reading)
        except BaseException:
            self.close()
            raise
        finally:
            os.close(reading)

    def _make(self, gbit: float, reading: int) -> None:
        _write_files(self.folder, self.names)
        self.enter = _ENTER.format(self._hold(SWITCH, [], reading)).split()
        pids = {name: self._hold(name, self.enter, reading) for name in self.names}
        address = f"addr add {SUBNET}.254/24 dev {BRIDGE}"
        links = [f"link add {BRIDGE} type bridge", address, f"link set {BRIDGE} up"]
        for number, (name, pid) in enumerate(pids.items(), 1):
            (self.folder / name / "pid").write_text(f"{pid}\n")
            links.append(f"link add port{number} type veth peer name {DEVICE} netns {pid}")
            links.append(f"link set port{number} master {BRIDGE} up")
        _batch(self.enter, "ip", links)
        ports = [f"port{number}" for number in range(1, len(pids) + 1)]
        _batch(self.enter, "tc", [limit(port, gbit) for port in ports])
        for number, pid in enumerate(pids.values(), 1):
            inside = [*self.enter, *_ENTER.format(pid).split()]
            bundle = min(_MAX_BUNDLE_NBYTES, burst(gbit) // _BUNDLES)
            own = f"addr add {SUBNET}.{number}/24 dev {DEVICE}"
            _batch(inside, "ip", [own, f"link set {DEVICE} gso_max_size {bundle} up"])
            _batch(inside, "tc", [limit(DEVICE, gbit)])
        self._first = set(self._processes())

    def _hold(self, name: str, outside: Sequence[str], reading: int) -> int:
        """Start the first process of a host or of the switch; return its number as seen from outside."""
        command = [*outside, *_NEW, "sh", "-c", _HOLD, name, str(self.folder / "hosts")]
        holder = subprocess.Popen(
            command, stdin=reading, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
        )
        self._holders.append(holder)
        assert holder.stdout is not None
        if not select.select([holder.stdout], [], [], _DEADLINE)[0]:
            raise NamespaceError(f"{name}: nothing was heard of it for {_DEADLINE:.0f} s")
        line = holder.stdout.readline().decode().strip()
        if not line.isdigit():
            raise NamespaceError(f"namespaces cannot be made: {line or 'unshare failed'}")
        return int(line)

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


def burst(gbit: float) -> int:
    """Return how many bytes a link may send at once."""
    return max(_MIN_BURST_NBYTES, int(gbit * 1e9 / 8 * _BURST_SECONDS))


def limit(device: str, gbit: float) -> str:
    """Return the command for ``tc`` that limits what a device sends."""
    return f"qdisc replace dev {device} root tbf rate {gbit * 1e9:.0f}bit burst {burst(gbit)} latency {_QUEUE}"


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


def _batch(inside: Sequence[str], tool: str, lines: Sequence[str]) -> None:
    done = subprocess.run(
        [*inside, tool, "-batch", "-"],
        input="\n".join(lines) + "\n",
        capture_output=True,
        text=True,
        timeout=_DEADLINE,
        check=False,
    )
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if not line.startswith("Command failed")]
        raise NamespaceError(f"{tool} fails: {' '.join(said) or f'exit status {done.returncode}'}")


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
