"""The emulated cluster: collectives are right across hosts, and nothing of it is ever left."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from bench import namespaces
from bench.cluster import EmulatedCluster, main, unavailable
from mpicoll.quantities import parse_rate
from tests.mpirun import REPOSITORY

pytestmark = pytest.mark.alone  # deadlines are short, or launches are many
PROGRAM = Path(__file__).with_name("programs") / "across.py"
RUN_SECONDS = 60.0
DELAYED_RUN_SECONDS = 180.0
END_SECONDS = 15.0
SLEEPER = "import time; print('here', flush=True); time.sleep(100)"
ORPHAN = """
from subprocess import DEVNULL, Popen
Popen(["sleep", "100"], stdin=DEVNULL, stdout=DEVNULL, stderr=DEVNULL, start_new_session=True)
"""
LOOK = """
from pathlib import Path
print(sum(path.read_bytes().startswith(b"sleep") for path in Path("/proc").glob("[0-9]*/cmdline")))
"""
PING = """
import time
from mpi4py import MPI
import numpy as np

comm, message, seconds = MPI.COMM_WORLD, np.zeros(1), []
peer = comm.size - 1 - comm.rank
for _ in range(20):
    begin = time.perf_counter()
    for turn in range(2):
        comm.Send(message, peer) if comm.rank % 2 == turn else comm.Recv(message, peer)
    seconds.append(time.perf_counter() - begin)
if comm.rank == 0:
    print(min(seconds))
"""
DELAY, JITTER = 0.02, 0.005
needs_hosts = pytest.mark.skipif(unavailable() is not None, reason=unavailable() or "")


def networks() -> set[str]:
    """Return the network namespaces that any process is in."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/ns/net"):
        with contextlib.suppress(OSError):
            found.add(str(path.readlink()))
    return found


def devices() -> set[str]:
    return {path.name for path in Path("/sys/class/net").iterdir()}


def folders() -> set[str]:
    return {path.name for path in Path(tempfile.gettempdir()).glob("mpicoll-cluster-*")}


def everything() -> tuple[set[str], set[str], set[str]]:
    return networks(), devices(), folders()


def relays(owner: int) -> set[int]:
    """Return the processes that relay frames for clusters of a process."""
    found, folder = set(), f"/mpicoll-cluster-{owner}-".encode()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            command = path.read_bytes()
            if folder in command and namespaces.RELAY_PROGRAM.encode() in command.split(b"\0"):
                found.add(int(path.parent.name))
    return found


def has_netem() -> bool:
    with EmulatedCluster(1, 1, delay=DELAY) as cluster:
        return cluster.description["delayed_by"] == "netem"


@functools.cache
def relay_missing() -> str:
    """Return why no relay can be here, "" if one can."""
    if unavailable() is not None:
        return unavailable() or ""
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(namespaces, "_has_netem", lambda inside: False)
            EmulatedCluster(1, 1, delay=DELAY).close()
    except namespaces.NamespaceError as error:
        return str(error)
    return ""


@pytest.fixture
def relay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a relay delay frames, also where the kernel can."""
    monkeypatch.setattr(namespaces, "_has_netem", lambda inside: False)


needs_relay = pytest.mark.skipif(bool(relay_missing()), reason=relay_missing())


def wait_for(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + END_SECONDS
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


@needs_hosts
@pytest.mark.parametrize("hosts", [2, 3])
def test_collectives_are_exact_across_hosts(hosts: int) -> None:
    before = everything()
    with EmulatedCluster(hosts=hosts, ranks_per_host=2, gbit=1.0) as cluster:
        done = cluster.run([str(PROGRAM)], timeout=RUN_SECONDS, environment={"PYTHONPATH": str(REPOSITORY)})
    assert done.returncode == 0, done.stderr
    assert done.stdout == "all exact\n"
    assert wait_for(lambda: everything() == before)


@needs_hosts
def test_one_cluster_runs_several_programs_and_passes_on_their_status() -> None:
    with EmulatedCluster(hosts=2, ranks_per_host=1) as cluster:
        assert cluster.run(["-c", "import sys; sys.exit(3)"], timeout=RUN_SECONDS).returncode == 3
        with pytest.raises(subprocess.TimeoutExpired) as late:
            cluster.run(["-c", SLEEPER], timeout=3.0)
        assert late.value.stdout.count("here") == 2
        assert cluster.run(["-c", ORPHAN], timeout=RUN_SECONDS).returncode == 0
        assert cluster.run(["-c", LOOK], timeout=RUN_SECONDS).stdout.split() in (["0", "0"], ["00"]), (
            "the orphan is still there"
        )


def start_sleeper(*options: str) -> subprocess.Popen[bytes]:
    """Start a cluster of its own whose two ranks sleep; return when they do."""
    command = [sys.executable, "-m", "bench.cluster", "--ranks", "1", *options, "--", "-c", SLEEPER]
    # Shells start what goes on in the background without interrupts; that must not come down to here.
    heeding = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    process = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, preexec_fn=heeding)
    assert process.stdout is not None
    assert process.stdout.readline().startswith(b"here")
    return process


@needs_hosts
@pytest.mark.parametrize("options", [[], ["--delay", "1ms"]], ids=["plain", "delay"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_after_a_signal(number: int, options: list[str]) -> None:
    before, relayed = everything(), bool(options) and not has_netem()
    process = start_sleeper(*options)
    try:
        assert len(networks() - before[0]) == 3
        assert bool(relays(process.pid)) == relayed
        process.send_signal(number)
        status = process.wait(END_SECONDS)
        assert status == (-number if number == signal.SIGKILL else 128 + number)
        assert wait_for(lambda: networks() == before[0])
        assert not relays(process.pid)
        assert devices() == before[1]
        if number == signal.SIGKILL:  # a folder of files is all that can be left; the next one removes it
            assert folders() != before[2]
            namespaces.Hosts(1, 1.0).close()
        assert folders() == before[2]
    finally:
        process.kill()
        process.communicate(timeout=END_SECONDS)


@needs_hosts
def test_the_link_is_measured(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--ranks", "1", "--rate", "500mbit", "--check", "--timeout", "30"]) == 0
    out = capfd.readouterr().out
    assert "set 0.5 Gbit/s" in out
    assert "no delay set; median" in out
    assert "one way: 16 MB" in out


@needs_relay
@pytest.mark.usefixtures("relay")
def test_collectives_are_exact_across_hosts_with_a_delay() -> None:
    before = everything()
    with EmulatedCluster(3, 2, gbit=1.0, delay=1e-3, jitter=1e-3) as cluster:
        assert relays(os.getpid())
        done = cluster.run([str(PROGRAM)], timeout=DELAYED_RUN_SECONDS, environment={"PYTHONPATH": str(REPOSITORY)})
        assert cluster.relayed.frames > 0
        assert cluster.description["delayed_by"] == "relay"
    assert done.returncode == 0, done.stderr
    # After slow starts UCX may warn of questions that ranks asked each other and nobody needed to receive.
    assert done.stdout.startswith("all exact\n")
    assert wait_for(lambda: everything() == before)
    assert not relays(os.getpid())


@needs_relay
@pytest.mark.usefixtures("relay")
def test_a_message_and_its_answer_take_twice_the_delay_at_least() -> None:
    with EmulatedCluster(2, 1, delay=DELAY, jitter=JITTER) as cluster:
        done = cluster.run(["-c", PING], timeout=DELAYED_RUN_SECONDS)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) >= 2 * (DELAY - JITTER)


@needs_relay
@pytest.mark.usefixtures("relay")
def test_the_delay_is_measured_beside_the_wanted_one(capfd: pytest.CaptureFixture[str]) -> None:
    options = "--ranks 1 --rate 500mbit --delay 2ms --jitter 500us --check --timeout 180"
    assert main(options.split()) == 0
    out, err = capfd.readouterr()
    line = re.search(r"set 2 ms ± 500 us by relay; median ([\d.]+) ms, 5 % below ([\d.]+) ms", out)
    assert line is not None, out
    assert float(line[1]) >= float(line[2]) >= 1.5
    assert re.search(r"relay: [\d,]+ frames .* late by more than 1 ms", err), err


@needs_relay
@pytest.mark.usefixtures("relay")
def test_the_end_of_the_relay_ends_the_run() -> None:
    before = everything()
    with EmulatedCluster(2, 1, delay=DELAY) as cluster:
        for pid in relays(os.getpid()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with pytest.raises(namespaces.NamespaceError, match="holds the links has ended"):
            cluster.run(["-c", SLEEPER], timeout=RUN_SECONDS)
    assert wait_for(lambda: everything() == before)


@needs_hosts
@pytest.mark.usefixtures("relay")
def test_nothing_is_left_where_the_relay_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    before = everything()
    monkeypatch.setattr(namespaces, "RELAY_PROGRAM", "bench.no_such_module")
    with pytest.raises(namespaces.NamespaceError, match=r"^relay cannot be made: .*no_such_module"):
        EmulatedCluster(2, 1, delay=DELAY)
    assert everything() == before


def test_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def reason() -> str:
        namespaces.unavailable.cache_clear()
        with pytest.raises(SystemExit) as ended:
            main(["--", "-c", "pass"])
        assert ended.value.code == 2
        return capsys.readouterr().err

    try:
        monkeypatch.setattr(namespaces.shutil, "which", lambda tool: None if tool == "tc" else tool)
        monkeypatch.setattr(namespaces.os, "geteuid", lambda: 0)
        assert "needs the command tc (package iproute2)" in reason()
        monkeypatch.setattr(namespaces.os, "geteuid", lambda: 1000)
        assert "needs root" in reason()
        monkeypatch.setattr(namespaces.sys, "platform", "darwin")
        assert "needs Linux" in reason()
    finally:
        monkeypatch.undo()
        namespaces.unavailable.cache_clear()


@needs_hosts
def test_what_the_kernel_refuses_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    before = everything()
    monkeypatch.setattr(namespaces, "limit", lambda device, *_: f"qdisc replace dev {device} root no_such_thing")
    with pytest.raises(namespaces.NamespaceError, match=r"^tc fails: .*qdisc") as failed:
        EmulatedCluster(2, 1)
    assert "\n" not in str(failed.value)
    assert everything() == before


@pytest.mark.parametrize(("text", "gbit"), [("1gbit", 1.0), ("2.5Gbit", 2.5), ("100mbit", 0.1)])
def test_rates(text: str, gbit: float) -> None:
    assert parse_rate(text) == gbit


@pytest.mark.parametrize(
    ("arguments", "says"),
    [(["--rate", "fast", "--", "x"], "--rate: 'fast'"), ([], "--check"), (["--check", "--", "x"], "--check"),
     (["--delay", "5", "--", "x"], "--delay: '5' is not a time"), (["--jitter=-1ms", "--", "x"], "--jitter: '-1ms'")],
)  # fmt: skip
def test_wrong_arguments(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"hosts": 0}, "hosts: 0"),
        ({"gbit": -1.0}, "gbit: -1"),
        ({"ranks_per_host": 0}, "per_host: 0"),
        ({"delay": 2.0}, "delay: 2 s"),
        ({"jitter": 0.1}, "jitter: 0.1 s"),
    ],
)
def test_wrong_numbers(wrong: dict[str, float], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        EmulatedCluster(**wrong)  # type: ignore[arg-type]
