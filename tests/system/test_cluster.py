"""The emulated cluster: collectives are right across hosts, and nothing of it is ever left."""

from __future__ import annotations

import contextlib
import functools
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from bench import namespaces
from bench.cluster import EmulatedCluster, main, parse_rate, unavailable
from tests.mpirun import REPOSITORY

PROGRAM = Path(__file__).with_name("programs") / "across.py"
RUN_SECONDS = 60.0
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


def start_sleeper() -> subprocess.Popen[bytes]:
    """Start a cluster of its own whose two ranks sleep; return when they do."""
    command = [sys.executable, "-m", "bench.cluster", "--ranks", "1", "--", "-c", SLEEPER]
    # Shells start what goes on in the background without interrupts; that must not come down to here.
    heeding = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    process = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, preexec_fn=heeding)
    assert process.stdout is not None
    assert process.stdout.readline().startswith(b"here")
    return process


@needs_hosts
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_after_a_signal(number: int) -> None:
    before = everything()
    process = start_sleeper()
    try:
        assert len(networks() - before[0]) == 3
        process.send_signal(number)
        status = process.wait(END_SECONDS)
        assert status == (-number if number == signal.SIGKILL else 128 + number)
        assert wait_for(lambda: networks() == before[0])
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
    assert "one way: 16 MB" in out


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
    monkeypatch.setattr(namespaces, "limit", lambda device, gbit: f"qdisc replace dev {device} root no_such_thing")
    with pytest.raises(namespaces.NamespaceError, match=r"^tc fails: .*qdisc") as failed:
        EmulatedCluster(2, 1)
    assert "\n" not in str(failed.value)
    assert everything() == before


@pytest.mark.parametrize(("text", "gbit"), [("1gbit", 1.0), ("2.5Gbit", 2.5), ("100mbit", 0.1)])
def test_rates(text: str, gbit: float) -> None:
    assert parse_rate(text) == gbit


@pytest.mark.parametrize("arguments", [["--rate", "fast", "--", "x"], [], ["--check", "--", "x"]])
def test_wrong_arguments(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2


@pytest.mark.parametrize(
    ("wrong", "says"),
    [({"hosts": 0}, "hosts: 0"), ({"gbit": -1.0}, "gbit: -1"), ({"ranks_per_host": 0}, "per_host: 0")],
)
def test_wrong_numbers(wrong: dict[str, float], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        EmulatedCluster(**wrong)  # type: ignore[arg-type]
