"""MPI programs on an emulated cluster: hosts of one machine, joined by links of a given rate and delay.

``python -m bench.cluster --hosts 4 --ranks 2 --rate 1gbit -- -m bench.collectives --collective allreduce`` runs Python
with these arguments on 4 hosts with 2 ranks each, under the MPI library of this Python; the exit status is the
program's. Ranks of one host share memory, ranks of different hosts have TCP over the links and nothing else.
``--delay 5ms --jitter 1ms`` has every frame take 4 to 6 ms from one host to another. ``--check`` measures what a link
carries and how long a message takes. Needs Linux, root, and ip and tc (package iproute2); see
:mod:`bench.namespaces`.

The hosts share this machine's cores: times of computation mean little, times of long messages mean much.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import launch
from bench.link_relay import RelayCounters
from bench.links import LinkDelay
from bench.namespaces import BRIDGE, SUBNET, Hosts, NamespaceError, unavailable
from mpicoll.environment import cores
from mpicoll.quantities import parse_rate, parse_seconds

__all__ = ["VARIABLE", "EmulatedCluster", "unavailable"]

VARIABLE = "MPICOLL_BENCH_CLUSTER"
"""Tells the ranks what they run on: see :attr:`EmulatedCluster.description`."""
_LOOK_SECONDS = 1.0
_END_SECONDS = 20.0


class EmulatedCluster:
    """Hosts with an MPI library to start programs on; a context manager.

    Parameters
    ----------
    hosts, ranks_per_host
        Ranks are numbered host by host.
    gbit
        10^9 bits per second of each host's link, each way.
    delay, jitter
        Seconds that every frame takes from one host to another, and by how much that varies, more or less.

    Attributes
    ----------
    relayed
        Counts of the relay that makes the delay, of the last run; zeros where there is none.

    Raises
    ------
    ValueError
        If an argument is out of range.
    NamespaceError
        If the machine does not allow it; `unavailable` says so beforehand.
    """

    def __init__(
        self, hosts: int = 2, ranks_per_host: int = 2, gbit: float = 1.0, delay: float = 0.0, jitter: float = 0.0
    ) -> None:
        if ranks_per_host < 1:
            raise ValueError(f"ranks_per_host: {ranks_per_host} is not at least 1")
        self.hosts, self.ranks_per_host, self.gbit = hosts, ranks_per_host, gbit
        self.delay = LinkDelay(delay, jitter)
        self.relayed = RelayCounters()
        self._hosts = Hosts(hosts, gbit, self.delay)

    @property
    def description(self) -> dict[str, Any]:
        """Facts of the cluster that every rank finds in its environment.

        ``{"hosts": 4, "ranks_per_host": 2, "gbit": 1.0, "delay": 0.005, "jitter": 0.0, "delayed_by": "relay"}``;
        times in seconds.
        """
        return {
            "hosts": self.hosts,
            "ranks_per_host": self.ranks_per_host,
            "gbit": self.gbit,
            "delay": self.delay.seconds,
            "jitter": self.delay.jitter,
            "delayed_by": self._hosts.delayed_by,
        }

    def run(
        self,
        arguments: Sequence[str],
        *,
        timeout: float,
        environment: Mapping[str, str] | None = None,
        stream: bool = False,
    ) -> subprocess.CompletedProcess[str]:
        """Run Python with `arguments` on all ranks, and leave no process behind.

        Parameters
        ----------
        timeout
            Seconds until it is killed.
        environment
            Variables besides those of this process.
        stream
            Let the output through instead of collecting it.

        Raises
        ------
        subprocess.TimeoutExpired
            If it took too long; what it has written is in there.
        NamespaceError
            If the links ended meanwhile.
        """
        hosts = [(name, self.ranks_per_host) for name in self._hosts.names]
        command, settings = launch.remote_command(hosts, self._hosts.agent, BRIDGE, f"{SUBNET}.0/24", arguments)
        variables = {**launch.clean_environment(), **settings, **(environment or {})}
        variables[VARIABLE] = json.dumps(self.description)
        # The hosts take turns on this machine's cores, which their ranks cannot see.
        variables.setdefault("MPICOLL_CORES", str(max(1, cores() // self.hosts)))
        variables["TMPDIR"] = str(self._hosts.folder / "switch")
        # Entering a mount namespace leads to its root.
        there = [*self._hosts.enter, "sh", "-c", 'cd "$0" && exec "$@"', str(Path.cwd()), *command]
        before = self._hosts.relayed()
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            process = subprocess.Popen(
                there,
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=None if stream else out,
                stderr=None if stream else err,
                start_new_session=True,
            )
            try:
                status = self._wait(process, timeout)
            except subprocess.TimeoutExpired as error:
                self._end(process)
                raise subprocess.TimeoutExpired(command, timeout, _text(out), _text(err)) from error
            finally:
                self._end(process)
            self._hosts.check()
            self.relayed = self._hosts.relayed().since(before)
            return subprocess.CompletedProcess(command, status, _text(out), _text(err))

    def _wait(self, process: subprocess.Popen[bytes], timeout: float) -> int:
        end = time.monotonic() + timeout
        while True:
            left = max(0.0, end - time.monotonic())
            try:
                return process.wait(min(left, _LOOK_SECONDS))
            except subprocess.TimeoutExpired:
                if left <= _LOOK_SECONDS:
                    raise
            self._hosts.check()

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        self._hosts.kill_programs()
        process.wait(_END_SECONDS)

    def close(self) -> None:
        """Take the hosts away, with all that runs there."""
        self._hosts.close()

    def __enter__(self) -> EmulatedCluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _text(file: Any) -> str:
    file.seek(0)
    return str(file.read())


def add_delay_options(parser: argparse.ArgumentParser) -> None:
    """Add ``--delay`` and ``--jitter``, in seconds."""
    delay = "time that every frame takes from one host to another, such as 5ms or 200us (default: none is added)"
    parser.add_argument("--delay", type=parse_seconds, default=0.0, metavar="TIME", help=delay)
    jitter = "by how much the delay varies, more or less (default: 0)"
    parser.add_argument("--jitter", type=parse_seconds, default=0.0, metavar="TIME", help=jitter)


def make_parser() -> argparse.ArgumentParser:
    """Build the parser."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.cluster", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--hosts", type=int, default=2, help="number of hosts (default: %(default)s)")
    add("--ranks", type=int, default=2, help="ranks on each host (default: %(default)s)")
    rate = "rate of each host's link, each way, such as 1gbit or 100mbit (default: 1gbit)"
    add("--rate", type=parse_rate, default=1.0, metavar="RATE", help=rate)
    add_delay_options(parser)
    add("--timeout", type=float, default=3600.0, metavar="S", help="seconds for the program (default: %(default)s)")
    add("--check", action="store_true", help="measure what the link between two hosts carries, and end")
    add("arguments", nargs="*", metavar="ARGUMENT", help="arguments of Python, after --")
    return parser


def _run(arguments: argparse.Namespace, program: Sequence[str]) -> int:
    where = (arguments.hosts, arguments.ranks, arguments.rate, arguments.delay, arguments.jitter)
    with EmulatedCluster(*where) as cluster:
        status = cluster.run(program, timeout=arguments.timeout, stream=True).returncode
        if cluster.relayed.frames and (arguments.check or cluster.relayed.too_slow):
            print(cluster.relayed.describe(), file=sys.stderr)
        return status


def main(argv: Sequence[str] | None = None) -> int:
    """Run a program on a cluster; the exit status is the program's, 2 where there can be no cluster."""
    parser = make_parser()
    arguments = parser.parse_args(argv)
    if arguments.check == bool(arguments.arguments):
        parser.error("give the arguments of Python after --, or --check")
    launch.end_on_signals()
    reason = unavailable()
    if reason is not None:
        parser.exit(2, f"{parser.prog}: {reason}\n")
    program = ["-m", "bench.link_check"] if arguments.check else arguments.arguments
    try:
        return _run(arguments, program)
    except (ValueError, FileNotFoundError, NamespaceError) as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    except subprocess.TimeoutExpired:
        parser.exit(124, f"{parser.prog}: killed after {arguments.timeout:.0f} s\n")
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        sys.exit(main())
